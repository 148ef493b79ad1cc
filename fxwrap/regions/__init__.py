"""Regions: the ATen operators that one kernel computes, as data, as text and as a function."""

from fxwrap.regions.region import Region as Region
from fxwrap.regions.region import output_name as output_name
from fxwrap.regions.region import parse_region as parse_region
from fxwrap.regions.runner import load_region as load_region
