#pragma once
// The simulator compiles the Hopper code paths of kernels.

constexpr bool on_hopper = true;
