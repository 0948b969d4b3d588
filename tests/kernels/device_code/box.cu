struct Shared {
  TmaTile<unsigned short, 16, 128> tile;
  Barrier full;
};
