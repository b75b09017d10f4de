// Which tile of a matmul's output a block computes next. Blocks are persistent, one per multiprocessor: cluster c of n
// computes tiles c, c + n, ... Tiles are numbered in groups of rows, within a group row by row, then column by column:
// the group's rows of a stay in L2 while b streams past. Of a batch one product's tiles follow the other's. Where the
// output is symmetric only the tiles that reach the diagonal or lie below it are numbered: column by column, from the
// diagonal down.
//
// A mixture of experts has its rows sorted by expert; those of an expert begin at a multiple of EXPERT_ROWS, with rows
// of zeros behind them, and are at least so many: a tile of rows has one expert. GROUPED_ROWS: it chooses the weight,
// and groups of rows end with an expert, so that memory gives each part of a weight once. GROUPED_K: the gradient of
// each expert's weight is a product (as of a batch) whose sum runs over its rows.
#pragma once

#include "../base/config.h"
#include "../cuda/common.cuh"

typedef enum { NOT_GROUPED, GROUPED_ROWS, GROUPED_K } MatmulGroups;

struct MatmulSchedule {
    int row_tiles, column_tiles, group;  // a row tile is that of a whole cluster; row tiles of a group
    int batch, each;                     // tiles of a product
    int rows, columns;                   // of a tile; columns are 0 if all tiles are wanted
    // On the device: where the rows of each expert begin, and where those of the last end; where each one's zeros
    // begin; then the expert of each EXPERT_ROWS rows. NULL: not grouped.
    const int *experts;
    int num_experts;
    int beside;  // of GROUPED_ROWS: weights (N,K) lie beside each other, in rows of num_experts K; else below
    struct Tile { int row, column, product; };
    __host__ __device__ int tiles() const { return each * batch; }
    // The first wanted tile of a column of tiles.
    __host__ __device__ int first_row(int column) const { return column * columns / rows; }
    // product: of GROUPED_ROWS the expert.
    template <MatmulGroups GROUPS = NOT_GROUPED> __device__ Tile tile(int i) const {
        int product = batch == 1 ? 0 : i / each;
        i -= product * each;
        for (int column = 0; columns > 0; column++) {
            const int row = first_row(column) + i;
            if (row < row_tiles) return {row, column, product};
            i = row - row_tiles;
        }
        int first = i / (group * column_tiles) * group, end = row_tiles;
        if constexpr (GROUPS == GROUPED_ROWS) {
            product = experts[2 * num_experts + 1 + i / column_tiles];
            const int begin = experts[product] / EXPERT_ROWS;
            first = begin + (i / column_tiles - begin) / group * group;
            end = experts[product + 1] / EXPERT_ROWS;
        }
        const int size = min(group, end - first), rest = i - first * column_tiles;
        return {first + rest % size, rest / size, product};
    }
    // Of an expert's rows, for GROUPED_K: at least one.
    __device__ int first_of(int expert) const { return experts[expert]; }
    __device__ int end_of(int expert) const { return max(experts[num_experts + 1 + expert], experts[expert] + 1); }
    // GROUPED_ROWS: there are as many tiles of rows as the experts' rows fill, which the host does not know.
    __device__ MatmulSchedule of_rows() const {
        MatmulSchedule s = *this;
        s.row_tiles = experts[num_experts] / EXPERT_ROWS;
        s.each = s.row_tiles * column_tiles;
        return s;
    }
    // Clusters to launch where `most` fit at once: as few as finish in as many rounds.
    int clusters(int most) const {
        const int rounds = (tiles() + most - 1) / most;
        return (tiles() + rounds - 1) / rounds;
    }
};
inline int matmul_group_rows = 2048;  // dev/cuda/matmul.cu times others
static MatmulSchedule matmul_schedule(int M, int N, int tile_rows, int tile_columns, int batch = 1, int symmetric = 0) {
    const size_t rows = (size_t)tile_rows;
    MatmulSchedule s = {(int)ceil_div(M, rows), (int)ceil_div(N, tile_columns), (int)ceil_div(matmul_group_rows, rows),
                        batch};
    s.rows = tile_rows;
    s.columns = symmetric ? tile_columns : 0;
    for (int c = 0; c < s.column_tiles; c++) s.each += s.row_tiles - s.first_row(c);
    return s;
}
