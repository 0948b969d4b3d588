#pragma once
// Selects code by target: ptxas allocates registers differently for each architecture.

constexpr bool on_hopper = __CUDA_ARCH__ >= 900;
