"""From a program to what runs it: Python text, C++ text, an FX graph, or the interpreter."""
