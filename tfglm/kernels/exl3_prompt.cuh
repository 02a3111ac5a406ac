// What the kernels of a prompt's experts share.
#pragma once
#include "exl3_rotate.cuh"

constexpr int WARPS = 8, THREADS = WARPS * 32;

struct Item {
    int expert, first, count, pad;  // picks first .. first + count - 1 of the expert's list
};
