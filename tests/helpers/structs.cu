#include <attention/extent.cuh>
#include <tile/tensor.cuh>

extern "C" __global__ void mine(Tensor<scalar> O, Sizes sizes, Mods mods, int causal_offset,
                                int window_offset) {
  static_assert(sizeof(Mods) == 1);
  const int row = threadIdx.x;
  const int found[] = {sizes.M,       sizes.N,      sizes.causal_offset, sizes.window_offset,
                       causal_offset, window_offset};
  if (row < sizes.M)
    for (int i = 0; i < dv; ++i) O.row(0, 0, row)[i] = scalar(real(found[i]));
}
