"""What was compiled before, by the content of the graph and all else that decides what a compile gives."""

from fxwrap.compile_cache.cache import Lookup as Lookup
from fxwrap.compile_cache.cache import look_up as look_up
from fxwrap.compile_cache.entry import Cached as Cached
from fxwrap.compile_cache.key import Request as Request
