// What the parts of the tests' driver share.
#pragma once

#include <cstdint>
#include <string>

void note(const std::string& line);  // writes down what was asked
int status(const char* name);        // what a function answers: 0, or the error that a test set under its name
int fake_capture_mode();
extern "C" int64_t fake_context();
