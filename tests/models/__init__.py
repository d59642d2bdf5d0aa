"""Every generating class of the installed Transformers, tiny, under `cache_implementation="paged"` and in stock."""
