"""Kernels that are compiled once for all tests."""

from __future__ import annotations

import pytest

from fusedoptim.raw import RawModule

SOURCE = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef struct { int a; float b; double c; } Record;

kernel void saxpy(ulong n, float a, global const float *x, global float *y) {
    size_t i = get_global_id(0);
    if (i < n) y[i] += a * x[i];
}
kernel void copy(global const void *from, global void *to) {
    size_t i = get_global_id(0);
    ((global char *)to)[i] = ((global const char *)from)[i];
}
kernel void where(global int *out) {
    size_t i = get_global_id(0), j = get_global_id(1), k = get_global_id(2);
    size_t at = (k * get_global_size(1) + j) * get_global_size(0) + i;
    out[at] = i + 10 * j + 100 * k + 1000 * get_local_size(0) + 10000 * get_local_size(1);
}
kernel void reversed(global float *out, local float *shared) {
    size_t i = get_local_id(0), n = get_local_size(0);
    shared[i] = get_global_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    out[get_global_id(0)] = shared[n - 1 - i];
}
kernel void required(global int *out) __attribute__((reqd_work_group_size(4, 2, 1)));
kernel __attribute__((reqd_work_group_size(4, 2, 1))) void required(global int *out) {
    out[get_global_id(0) + get_global_size(0) * get_global_id(1)] = get_local_size(0);
}
kernel void scalars(global double *out, char b, uchar B, short h, ushort H, int i, uint I, long q,
                    ulong Q, half e, float f, double d) {
    double all[] = {b, B, h, H, i, I, q, Q, e, f, d};
    for (int k = 0; k < 11; k++) out[k] = all[k];
}
kernel void vectors(global double *out, char2 two, float2 pair) {
    out[0] = two.x; out[1] = two.y; out[2] = pair.x; out[3] = pair.y;
}
kernel void wide(global double *out, float4 four, float3 three, Record record) {
    out[0] = four.x; out[1] = four.w; out[2] = three.z; out[3] = record.a; out[4] = record.c;
}
kernel void typed(global half *e, global float *f, global double *d, global short *h,
                  global ushort *H, global int *i, global ulong *Q, global char *b,
                  global float2 *pair, global float4 *four, global Record *record) {}
kernel void image(read_only image2d_t picture, global int *x) {}
kernel void nothing() {}
"""


@pytest.fixture(scope="session")
def module() -> RawModule:
    return RawModule(SOURCE)
