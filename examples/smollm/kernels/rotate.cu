// rotate: applies the rotary embedding to the queries and keys of prompts, in place, and copies
// keys and values into the pages of their sequences. Pairs of columns are (2 i, 2 i + 1).
//
//   qkv [rows, heads + 2 kv_heads, d]: all queries of a row, then its keys, then its values
//   pages, places [rows]: the page of each row and its place in the page
//   positions [rows], cosines, sines [positions, d / 2]
//   K, V [pages, page_size, kv_heads, d]
//   grid (rows)    block (d / 2 * (heads + 2 kv_heads))
extern "C" __global__ void rotate(scalar* qkv, const int* pages, const int* places,
                                  const int* positions, const float* cosines, const float* sines,
                                  scalar* K, scalar* V, int page_size, int heads, int kv_heads,
                                  int d) {
  const int row = blockIdx.x, pairs = d / 2, head = threadIdx.x / pairs;
  const int pair = threadIdx.x % pairs;
  scalar* at = qkv + 2 * ((long long)row * blockDim.x + threadIdx.x);
  float x = number(at[0]), y = number(at[1]);
  if (head < heads + kv_heads) {
    const int angle = positions[row] * pairs + pair;
    const float c = cosines[angle], s = sines[angle], rotated = c * x - s * y;
    y = s * x + c * y, x = rotated;
    store(at, x), store(at + 1, y);
  }
  if (head < heads) return;
  const long long place = (long long)pages[row] * page_size + places[row];
  scalar* to = head < heads + kv_heads ? K : V;
  to += (place * kv_heads + (head - heads) % kv_heads) * d + 2 * pair;
  store(to, x), store(to + 1, y);
}
