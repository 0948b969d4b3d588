#pragma once
// The maximum number of resident threads per SM.

constexpr bool is_of_server =
    __CUDA_ARCH__ == 800 || __CUDA_ARCH__ / 100 == 9 || __CUDA_ARCH__ / 100 == 10;
constexpr int resident_threads = is_of_server ? 2048 : 1536;
