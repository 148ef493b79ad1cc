"""The compile cache: compiled programs by the content of graph, options and environment."""

from fxwrap.compile_cache.cache import CacheSlot as CacheSlot
from fxwrap.compile_cache.cache import find_slot as find_slot
from fxwrap.compile_cache.cache import is_enabled as is_enabled
from fxwrap.compile_cache.counts import CompileCounts as CompileCounts
from fxwrap.compile_cache.counts import compile_counts as compile_counts
from fxwrap.compile_cache.entry import CachedCompile as CachedCompile
from fxwrap.compile_cache.graph_serializer import NotCacheable as NotCacheable
from fxwrap.compile_cache.key import CompileRequest as CompileRequest
from fxwrap.compile_cache.key import backend_key as backend_key
from fxwrap.compile_cache.key import content_key as content_key
from fxwrap.compile_cache.sharing import check_ranks_compile_alike as check_ranks_compile_alike
from fxwrap.compile_cache.sharing import shared_compile as shared_compile
