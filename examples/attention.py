import numpy as np

import cupyfa

rng = np.random.default_rng(0)
q = rng.standard_normal((2, 8, 300, 64), np.float32)  # [batch, heads, queries, d]
k = rng.standard_normal((2, 2, 500, 64), np.float32)  # [batch, kv_heads, keys, d]
v = rng.standard_normal((2, 2, 500, 64), np.float32)

out, lse = cupyfa.attention(q, k, v, causal="bottom-right", return_lse=True, check=True)
print(out.shape, lse.shape)
