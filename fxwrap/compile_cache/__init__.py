"""The compile cache: compiled programs by the content of graph, options and environment."""

from fxwrap.compile_cache.cache import CacheSlot as CacheSlot
from fxwrap.compile_cache.cache import find_slot as find_slot
from fxwrap.compile_cache.entry import CachedCompile as CachedCompile
from fxwrap.compile_cache.job import find_job_compile as find_job_compile
from fxwrap.compile_cache.key import CompileRequest as CompileRequest
