"""The native code: a launch on the CPU, and what each of torch's threads runs in it.

It is compiled from LLVM's assembly language, because the project needs no C compiler otherwise. It
is ordinary x86-64 code that calls nothing but the driver and OpenMP, through addresses in its
argument, and has no relocations: its bytes run wherever they are mapped, and begin with the entry
point.
"""

from __future__ import annotations

import llvmlite.binding as llvm

_TRIPLE = "x86_64-unknown-linux-gnu"
_SECTIONS = {None, b".text", b".strtab", b".symtab", b".note.GNU-stack"}
"""The sections of code that refers to nothing else."""
# The fields are those of `Parts` in launch/parts.py. A thread begins with the part of its own
# number, as its core may have those elements in its cache since the last launch; then it takes
# parts that no thread has begun. A thread whose number no part has leaves all to those before it.
# Between its first part and its second, the calling thread calls `meanwhile`. In C:
#
#   int run(struct Parts *p) {
#       p->next = p->done = p->status = p->taken = 0;
#       if (p->region) p->region(run_parts, p, 0, 0); else run_parts(p);
#       return p->status;
#   }
#
#   static void run_parts(struct Parts *p) {
#       size_t part = p->region ? p->thread_number() : 0;
#       void (*meanwhile)(void) = part == 0 ? p->meanwhile : NULL;
#       if (part >= 64) part = atomic_fetch_add(&p->next, 1);
#       size_t first;
#       for (; (first = part * p->each) < p->groups; part = atomic_fetch_add(&p->next, 1)) {
#           if (part < 64 && atomic_fetch_or(&p->taken, 1 << part) >> part & 1) continue;
#           size_t left = p->groups - first, groups = p->each < left ? p->each : left;
#           size_t offset[2] = {0, first}, items[2] = {groups * p->lanes, 1};
#           size_t group[2] = {p->lanes, 1};
#           int status = p->enqueue(p->queue, p->kernel, 2, offset, items, group, 0, NULL, NULL);
#           if (status) { p->status = status; return; }
#           atomic_fetch_add(&p->done, groups);
#           if (meanwhile) { meanwhile(); meanwhile = NULL; }
#       }
#       if (meanwhile) meanwhile();
#   }
SOURCE = """
%enqueue = type i32 (i8*, i8*, i32, i64*, i64*, i64*, i32, i8*, i8*)
%region = type void (i8*, i8*, i32, i32)
%number = type i32 ()
%action = type void ()
%parts = type { i64, i64, i64, i64, i64, i64, i64, %enqueue*, i8*, i8*, %region*, %number*,
                %action* }

define i32 @run(%parts* %p) nounwind {
entry:
  %at_next = getelementptr %parts, %parts* %p, i32 0, i32 0
  %at_taken = getelementptr %parts, %parts* %p, i32 0, i32 1
  %at_done = getelementptr %parts, %parts* %p, i32 0, i32 2
  %at_status = getelementptr %parts, %parts* %p, i32 0, i32 3
  %at_region = getelementptr %parts, %parts* %p, i32 0, i32 10
  store i64 0, i64* %at_next
  store i64 0, i64* %at_taken
  store i64 0, i64* %at_done
  store i64 0, i64* %at_status
  %region = load %region*, %region** %at_region
  %is_alone = icmp eq %region* %region, null
  br i1 %is_alone, label %alone, label %together

alone:
  call void @run_parts(%parts* %p)
  br label %end

together:
  %function = bitcast void (%parts*)* @run_parts to i8*
  %argument = bitcast %parts* %p to i8*
  call void %region(i8* %function, i8* %argument, i32 0, i32 0)
  br label %end

end:
  %status = load i64, i64* %at_status
  %result = trunc i64 %status to i32
  ret i32 %result
}

define internal void @run_parts(%parts* %p) nounwind {
entry:
  %offset = alloca [2 x i64]
  %items = alloca [2 x i64]
  %group = alloca [2 x i64]
  %at_action = alloca %action*
  %at_next = getelementptr %parts, %parts* %p, i32 0, i32 0
  %at_taken = getelementptr %parts, %parts* %p, i32 0, i32 1
  %at_done = getelementptr %parts, %parts* %p, i32 0, i32 2
  %at_status = getelementptr %parts, %parts* %p, i32 0, i32 3
  %at_groups = getelementptr %parts, %parts* %p, i32 0, i32 4
  %at_each = getelementptr %parts, %parts* %p, i32 0, i32 5
  %at_lanes = getelementptr %parts, %parts* %p, i32 0, i32 6
  %at_enqueue = getelementptr %parts, %parts* %p, i32 0, i32 7
  %at_queue = getelementptr %parts, %parts* %p, i32 0, i32 8
  %at_kernel = getelementptr %parts, %parts* %p, i32 0, i32 9
  %at_region = getelementptr %parts, %parts* %p, i32 0, i32 10
  %at_number = getelementptr %parts, %parts* %p, i32 0, i32 11
  %at_meanwhile = getelementptr %parts, %parts* %p, i32 0, i32 12
  %all = load i64, i64* %at_groups
  %each = load i64, i64* %at_each
  %lanes = load i64, i64* %at_lanes
  %enqueue = load %enqueue*, %enqueue** %at_enqueue
  %queue = load i8*, i8** %at_queue
  %kernel = load i8*, i8** %at_kernel
  %offset0 = getelementptr [2 x i64], [2 x i64]* %offset, i32 0, i32 0
  %offset1 = getelementptr [2 x i64], [2 x i64]* %offset, i32 0, i32 1
  %items0 = getelementptr [2 x i64], [2 x i64]* %items, i32 0, i32 0
  %items1 = getelementptr [2 x i64], [2 x i64]* %items, i32 0, i32 1
  %group0 = getelementptr [2 x i64], [2 x i64]* %group, i32 0, i32 0
  %group1 = getelementptr [2 x i64], [2 x i64]* %group, i32 0, i32 1
  store i64 0, i64* %offset0
  store i64 1, i64* %items1
  store i64 %lanes, i64* %group0
  store i64 1, i64* %group1
  %meanwhile = load %action*, %action** %at_meanwhile
  store %action* %meanwhile, %action** %at_action
  %region = load %region*, %region** %at_region
  %is_alone = icmp eq %region* %region, null
  br i1 %is_alone, label %next, label %own

own:
  %number = load %number*, %number** %at_number
  %thread = call i32 %number()
  %is_caller = icmp eq i32 %thread, 0
  %own_action = select i1 %is_caller, %action* %meanwhile, %action* null
  store %action* %own_action, %action** %at_action
  %own_part = zext i32 %thread to i64
  %has_own = icmp ult i64 %own_part, 64
  br i1 %has_own, label %check, label %next

next:
  %next_part = atomicrmw add i64* %at_next, i64 1 monotonic
  br label %check

check:
  %part = phi i64 [ %own_part, %own ], [ %next_part, %next ]
  %first = mul i64 %part, %each
  %is_left = icmp ult i64 %first, %all
  br i1 %is_left, label %take, label %none_left

take:
  %may_be_taken = icmp ult i64 %part, 64
  br i1 %may_be_taken, label %mark, label %run

mark:
  %bit = shl i64 1, %part
  %marked = atomicrmw or i64* %at_taken, i64 %bit monotonic
  %same = and i64 %marked, %bit
  %is_free = icmp eq i64 %same, 0
  br i1 %is_free, label %run, label %next

run:
  %left = sub i64 %all, %first
  %is_last = icmp ult i64 %left, %each
  %groups = select i1 %is_last, i64 %left, i64 %each
  %count = mul i64 %groups, %lanes
  store i64 %first, i64* %offset1
  store i64 %count, i64* %items0
  %result = call i32 %enqueue(i8* %queue, i8* %kernel, i32 2, i64* %offset0, i64* %items0,
                              i64* %group0, i32 0, i8* null, i8* null)
  %is_done = icmp eq i32 %result, 0
  br i1 %is_done, label %count_done, label %refused

count_done:
  %before = atomicrmw add i64* %at_done, i64 %groups monotonic
  %action = load %action*, %action** %at_action
  %has_action = icmp ne %action* %action, null
  br i1 %has_action, label %act, label %next

act:
  store %action* null, %action** %at_action
  call void %action()
  br label %next

refused:
  %status = sext i32 %result to i64
  store i64 %status, i64* %at_status
  br label %end

none_left:
  %last_action = load %action*, %action** %at_action
  %is_still_to_act = icmp ne %action* %last_action, null
  br i1 %is_still_to_act, label %act_last, label %end

act_last:
  call void %last_action()
  br label %end

end:
  ret void
}
"""


def compile_native() -> bytes:
    """The machine code, for any x86-64, which begins with ``run``.

    Raises:
        RuntimeError: it would not run wherever it is mapped.
    """
    llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Without SSE, no constants are placed in a separate section.
    machine = llvm.Target.from_triple(_TRIPLE).create_target_machine(
        cpu="x86-64", features="-sse", opt=2, reloc="pic", codemodel="small"
    )
    module = llvm.parse_assembly(SOURCE)
    module.verify()
    compiled = llvm.ObjectFileRef.from_data(machine.emit_object(module))
    sections = {section.name(): section.data() for section in compiled.sections()}
    if not sections.keys() <= _SECTIONS:
        raise RuntimeError(f"expected code alone, and found {sorted(map(str, sections))}")
    code: bytes = sections[b".text"]
    return code
