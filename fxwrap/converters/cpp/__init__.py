"""Programs as C++ source."""

from fxwrap.converters.cpp.converter import to_cpp as to_cpp
