#pragma once
// The GPU that a kernel is compiled for: ptxas allocates other registers for each.

constexpr bool on_hopper = __CUDA_ARCH__ >= 900;
