#pragma once
// What the GPU is that a kernel is compiled for: ptxas finds other registers for each.

constexpr bool on_hopper = __CUDA_ARCH__ >= 900;
