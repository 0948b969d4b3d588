#pragma once
// The simulator compiles what kernels do on Hopper.

constexpr bool on_hopper = true;
