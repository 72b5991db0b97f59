// Likewise, for the tests.
#include <gtest/gtest.h>
#include "others.hxx"
