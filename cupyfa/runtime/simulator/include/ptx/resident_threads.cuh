#pragma once
// The maximum number of resident threads per SM, as on Hopper.

constexpr int resident_threads = 2048;
