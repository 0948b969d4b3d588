#pragma once
// The simulator compiles the code that kernels have for Hopper.

constexpr bool on_hopper = true;
