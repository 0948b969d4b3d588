int bytes = me % 9 * 2;
cp_async(tile[me], bytes == 0 ? A + s0 : A + me * 8, bytes);
cp_async_commit_group();
cp_async_wait_group<0>();
for (int i = 0; i < 8; ++i) B[me * 8 + i] = tile[me][i];
