#pragma once
// Maximum number of resident threads per SM on Hopper.

constexpr int resident_threads = 2048;
