// Merges attention over several parts of the keys: the second launch of split-KV.

constexpr int d = 8;  // columns; one block per row, one thread per column
constexpr float infinity = __builtin_bit_cast(float, 0x7f800000);

// O_parts [parts, M, d], lse_parts [parts, M]: results of attention over each part of the keys.
// out [M, d], lse [M]: results of attention over all keys.
extern "C" __global__ void split_kv(const float* O_parts, const float* lse_parts, float* out,
                                    float* lse, int parts, int M) {
  const int row = blockIdx.x, col = threadIdx.x;
  float result = 0, result_lse = -infinity;
  // hole
  float m = -infinity, l = 0;
  for (int part = 0; part < parts; ++part) m = fmaxf(m, lse_parts[part * M + row]);
  for (int part = 0; part < parts; ++part) {
    const float part_lse = lse_parts[part * M + row];
    if (part_lse == -infinity) continue;  // no keys: O_parts was not written
    const float weight = expf(part_lse - m);
    l += weight;
    result += weight * O_parts[(part * M + row) * d + col];
  }
  if (l > 0) result /= l;
  result_lse = m + logf(l);
  // end
  out[row * d + col] = result;
  if (col == 0) lse[row] = result_lse;
}
