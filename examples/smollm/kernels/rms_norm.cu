// rms_norm: the RMS norm of each row, y = x / sqrt(mean(x^2) + epsilon) * weight, one warp per row.
//
//   x, y [rows, width], weight [width]
//   grid (cdiv(rows, warps))    block (32 * warps)
//   the host sets: scalar, epsilon
extern "C" __global__ void rms_norm(const float* x, const float* weight, scalar* y, int rows,
                                    int width) {
  const long long row = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= rows) return;
  x += row * width, y += row * width;
  float squares = 0;
  for (int k = lane; k < width; k += 32) squares += x[k] * x[k];
  const float factor = rsqrtf(warp_sum(squares) / width + epsilon);
  for (int k = lane; k < width; k += 32) store(y + k, x[k] * factor * weight[k]);
}
