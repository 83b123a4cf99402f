//! `fork`, told to the pager before it happens.
//!
//! No code of glibc's may run in a child before it is attached. `fork` itself puts malloc's arenas
//! and the open streams in order there, long before any handler of `pthread_atfork`. Their pages in
//! the pool would read as zeros. So the system calls themselves are replaced
//! ([`crate::hook::sites`]): the clone inside of glibc's `_Fork`, the one in its `clone`, and those
//! that its `syscall` is asked for. Each makes the same system call, by `hecaton_follow`, and in
//! the child returns once it is attached. Children that share their parent's memory (threads,
//! `vfork`) are none of this module's business.
//!
//! Userfaultfd's own event for forks was rejected: it takes CAP_SYS_PTRACE in the program, and two
//! ways of following a fork are one too many. The price: a child made by a `syscall` instruction of
//! the program's own cannot be followed. It has none of the memory that may be in the pool
//! ([`crate::withhold`]).
//!
//! Between the pager's word to go and the child's attachment no page of the program's may be
//! touched, because no fault is served. The parent's faults are held back so that its memory, the
//! pager's tables and the child agree; the child's have no pager yet. So all of it runs on a stack
//! of the library's own, with signals blocked. The kernel itself writes twice in the child before
//! its first instruction. The thread's id is left out and written later. The restartable sequence's
//! processor number needs its page in memory.

mod local;

use crate::attach;
use crate::failure::Failure;
use crate::turn::{self, Alone};
use crate::{own, sys, withhold};
use hecaton_uffd::Errno;
use libc::c_int;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering::Relaxed};

/// The forking thread's signal mask. Guarded, like all that follows, by the fork's being alone.
#[unsafe(link_section = ".data")]
static MASK: AtomicU64 = AtomicU64::new(0);
#[unsafe(link_section = ".data")]
static CONNECTION: AtomicI32 = AtomicI32::new(-1);
/// The first page to which the kernel writes in the forking thread's memory whenever it runs, and
/// how many pages.
#[unsafe(link_section = ".data")]
static WRITTEN: [AtomicUsize; 2] = [const { AtomicUsize::new(0) }; 2];
const MAX_WRITTEN: usize = 3;
/// Where the program wants the child's number or descriptor written, in the parent; 0: nowhere. The
/// kernel writes it here: it does so before the child runs, and a page of the program's may be in
/// the pool.
#[unsafe(link_section = ".data")]
static PARENTS_WORD_AT: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = ".data")]
static PARENTS_WORD: AtomicI32 = AtomicI32::new(0);
/// From a thread's pointer to its area of restartable sequences; 0: none.
#[unsafe(link_section = ".data")]
static SEQUENCES_OFFSET: AtomicUsize = AtomicUsize::new(0);

/// How often a fork is announced anew because a page was evicted just before.
const TRIES: usize = 16;

const ALL_SIGNALS: u64 = u64::MAX;

/// On the program's stack: gets hold of the library's. Returns the end of that.
extern "C" fn enter() -> usize {
    let mask = sys::set_signal_mask(ALL_SIGNALS);
    // Given back in `leave`, in each of the two processes.
    std::mem::forget(Alone::for_fork());
    MASK.store(mask, Relaxed);
    let page_of = |address: usize| address & !(own::PAGE - 1);
    let offset = SEQUENCES_OFFSET.load(Relaxed);
    let written = match offset {
        // A bare program does not tell. Static glibc has the area near the thread's control block,
        // below or in it; others have none.
        0 if own::is_bare() => {
            [page_of(thread_pointer_of_bare()).wrapping_sub(own::PAGE), MAX_WRITTEN]
        }
        0 => [0, 0],
        _ => [page_of(thread_pointer().wrapping_add(offset)), 1],
    };
    WRITTEN.iter().zip(written).for_each(|(word, value)| word.store(value, Relaxed));
    own::fork_stack_top()
}

/// The thread's pointer, which may point to nothing.
fn thread_pointer_of_bare() -> usize {
    const ARCH_GET_FS: usize = 0x1003;
    let mut pointer = 0usize;
    // SAFETY: the kernel writes one word.
    let _ = unsafe {
        let to = &raw mut pointer as usize;
        hecaton_uffd::sys::syscall(libc::SYS_arch_prctl, [ARCH_GET_FS, to, 0, 0, 0, 0])
    };
    pointer
}

fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: by the ABI the first word at fs is its own address.
    unsafe {
        std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly));
    }
    pointer
}

/// A pipe whose writing end the child closes when it has attached. The parent's `fork` returns
/// then: who knows the child's number may read its memory, and finds zeros until it has attached.
#[unsafe(link_section = ".data")]
static ATTACHED_PIPE: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];
/// How long the pager gives a child to attach.
const CHILD_PATIENCE_MS: usize = 10_000;

/// Whether the fork under way is a [`local`] one.
#[unsafe(link_section = ".data")]
static IS_LOCAL: AtomicBool = AtomicBool::new(false);
/// Whether the program has been told of a child that stays local.
#[unsafe(link_section = ".data")]
static HAS_TOLD: AtomicBool = AtomicBool::new(false);

/// How a child is to be made.
enum Ready {
    /// It attaches by this connection.
    Followed(RawFd),
    /// It stays local.
    Local,
}

/// On the library's stack: has the pager get ready. Returns -1 if no child is to be made.
extern "C" fn begin(flags: u64, parents_word: usize) -> c_int {
    attach::end_if_copied_unseen();
    let writes_word = flags & (libc::CLONE_PARENT_SETTID | libc::CLONE_PIDFD) as u64 != 0;
    PARENTS_WORD_AT.store(if writes_word { parents_word } else { 0 }, Relaxed);
    match get_ready(flags) {
        Ok(ready) => {
            let (connection, is_local) = match ready {
                Ready::Followed(connection) => (connection, false),
                Ready::Local => (-1, true),
            };
            CONNECTION.store(connection, Relaxed);
            IS_LOCAL.store(is_local, Relaxed);
            if !is_local {
                // Without one the parent does not wait.
                let pipe = sys::pipe().unwrap_or([-1; 2]);
                ATTACHED_PIPE.iter().zip(pipe).for_each(|(end, fd)| end.store(fd, Relaxed));
            }
            0
        }
        Err(failure) => {
            failure.report();
            in_parent(-1);
            -1
        }
    }
}

fn get_ready(flags: u64) -> Result<Ready, Failure> {
    if own::is_unpaged() {
        return Ok(Ready::Local);
    }
    let followed = if own::is_filtered() {
        Err(Failure("its system calls are filtered", Errno(libc::EPERM)))
    } else if flags & libc::CLONE_FILES as u64 != 0 {
        // Each of the two needs a userfaultfd of its own under the same number.
        Err(Failure("descriptors stay shared", Errno(libc::EPERM)))
    } else if flags & libc::CLONE_NEWUSER as u64 != 0 {
        Err(Failure(
            "in another user namespace they have no right to a userfaultfd",
            Errno(libc::EPERM),
        ))
    } else {
        attach::may_be_followed().and_then(|()| follow())
    };
    match followed {
        Ok(connection) => Ok(Ready::Followed(connection)),
        Err(failure)
            if matches!(failure.1.0, libc::EPERM | libc::EACCES | libc::ENOENT | libc::ENOSYS) =>
        {
            local::bring_all_in()?;
            if !HAS_TOLD.swap(true, Relaxed) {
                failure.report_with("its children stay on local memory");
            }
            Ok(Ready::Local)
        }
        Err(failure) => Err(failure),
    }
}

/// Returns the child's connection.
fn follow() -> Result<RawFd, Failure> {
    for _ in 0..TRIES {
        let [first, count] = WRITTEN.each_ref().map(|word| word.load(Relaxed));
        let (mut written, mut brought_in) = ([0usize; MAX_WRITTEN], 0);
        for page in (0..count).map(|i| first.wrapping_add(i * own::PAGE)) {
            if bring_in(page) {
                written[brought_in] = page;
                brought_in += 1;
            }
        }
        // The pager looks whether one was evicted since. This thread could not: the kernel writes
        // to them before it returns from the system call that waits for the answer.
        let Some(connection) = attach::announce_fork(&written[..brought_in])? else { continue };
        return match withhold::suspend() {
            Ok(()) => Ok(connection),
            Err(failure) => {
                sys::close(connection);
                Err(failure)
            }
        };
    }
    Err(Failure("a fork finds no memory for its thread", Errno(libc::EAGAIN)))
}

/// Makes a page resident and writable, so that the kernel's next write to it faults in no pager.
/// False if the page is not mapped writable.
fn bring_in(page: usize) -> bool {
    // SAFETY: changes no contents.
    unsafe { sys::advise(page, own::PAGE, libc::MADV_POPULATE_WRITE as usize) }.is_ok()
}

/// In the parent, still on the library's stack, whether there is a child or not (then `result` is
/// negative).
extern "C" fn in_parent(result: isize) {
    if result < 0 {
        PARENTS_WORD_AT.store(0, Relaxed);
    }
    if !own::is_unpaged() {
        withhold::resume();
    }
    let [read, write] = ATTACHED_PIPE.each_ref().map(|end| end.swap(-1, Relaxed));
    close_all([CONNECTION.swap(-1, Relaxed), write]);
    if result >= 0 {
        sys::wait_for_end(read, CHILD_PATIENCE_MS);
    }
    close_all([read]);
}

fn close_all<const N: usize>(fds: [RawFd; N]) {
    fds.into_iter().filter(|&fd| fd >= 0).for_each(sys::close);
}

/// In the child, on the library's stack: attaches, and does what the kernel was not let do.
extern "C" fn in_child(flags: u64, thread_id_at: *mut i32) {
    turn::forget_others();
    PARENTS_WORD_AT.store(0, Relaxed);
    if IS_LOCAL.load(Relaxed) {
        attach::stay_local(flags & libc::CLONE_FILES as u64 != 0);
    } else {
        let [read, write] = ATTACHED_PIPE.each_ref().map(|end| end.swap(-1, Relaxed));
        close_all([read]);
        let attached = attach::child(CONNECTION.swap(-1, Relaxed), || close_all([write]));
        if let Err(failure) = attached {
            failure.report_and_exit();
        }
        withhold::resume();
    }
    if flags & libc::CLONE_CHILD_SETTID as u64 != 0 {
        // SAFETY: the caller names a word of its own.
        unsafe { thread_id_at.write_volatile(sys::thread_id()) };
    }
}

/// Back on the program's stack, in both.
extern "C" fn leave() {
    let (mask, word_at) = (MASK.load(Relaxed), PARENTS_WORD_AT.swap(0, Relaxed));
    let word = PARENTS_WORD.load(Relaxed);
    turn::end_fork();
    if word_at != 0 {
        // SAFETY: the caller has named it for this.
        unsafe { (word_at as *mut i32).write_volatile(word) };
    }
    sys::set_signal_mask(mask);
}

// Makes the system call `clone` of whoever jumps here, with its arguments, and jumps to r11. All
// other registers are as before, except those that a system call changes (rax, rcx, flags). It
// stands in the middle of functions: the 128 bytes below the stack pointer may be in use, which is
// why it is jumped to, not called, and why it steps over them.
//
// rbx: the program's stack. rbp, r12 to r15: the system call's arguments, because the stack they
// were saved on must not be touched between `begin` and the return from `in_child`. If the child is
// to have another stack, it gets that at the end.
std::arch::global_asm!(
    ".p2align 4",
    ".global hecaton_follow",
    ".hidden hecaton_follow",
    "hecaton_follow:",
    "lea rsp, [rsp - 128]",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r8",
    "push r9",
    "push r10",
    "push r11",
    "mov rbx, rsp",
    "mov r12, rdi",
    "mov r13, rdx",
    "mov r15, r10",
    "mov rbp, r8",
    "sub rsp, 512",
    "and rsp, -64",
    "fxsave64 [rsp]",
    "call {enter}",
    "mov rsp, rax",
    "mov rdi, r12",
    "mov rsi, r13",
    "call {begin}",
    "test eax, eax",
    "js 2f",
    "mov rdi, r12",
    "and rdi, {kept_flags}",
    "xor esi, esi",
    "lea rdx, [rip + {parents_word}]",
    "mov r10, r15",
    "mov r8, rbp",
    "mov eax, {clone}",
    "syscall",
    "test rax, rax",
    "jz 3f",
    "mov r12, rax",
    "mov rdi, rax",
    "call {in_parent}",
    "jmp 4f",
    "2:",
    "mov r12, {not_now}",
    "jmp 4f",
    "3:",
    "mov rdi, r12",
    "mov rsi, r15",
    "call {in_child}",
    "xor r12d, r12d",
    "4:",
    "mov rsp, rbx",
    "sub rsp, 512",
    "and rsp, -64",
    "call {leave}",
    "fxrstor64 [rsp]",
    "mov rax, r12",
    "mov rsp, rbx",
    "pop r11",
    "pop r10",
    "pop r9",
    "pop r8",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "lea rsp, [rsp + 128]",
    "test rax, rax",
    "jnz 5f",
    "test rsi, rsi",
    "jz 5f",
    "mov rsp, rsi",
    "5:",
    "jmp r11",
    // The same for the system call `fork`, which has no arguments: the registers that `clone` has
    // its own in may be in use.
    ".p2align 4",
    ".global hecaton_follow_fork",
    ".hidden hecaton_follow_fork",
    "hecaton_follow_fork:",
    "lea rsp, [rsp - 128]",
    "push rdi",
    "push rsi",
    "push rdx",
    "push r8",
    "push r10",
    "push r11",
    "mov edi, {sigchld}",
    "xor esi, esi",
    "xor edx, edx",
    "xor r8d, r8d",
    "xor r10d, r10d",
    "lea r11, [rip + 6f]",
    "jmp hecaton_follow",
    "6:",
    "pop r11",
    "pop r10",
    "pop r8",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "lea rsp, [rsp + 128]",
    "jmp r11",
    sigchld = const libc::SIGCHLD,
    enter = sym enter,
    begin = sym begin,
    in_parent = sym in_parent,
    in_child = sym in_child,
    leave = sym leave,
    parents_word = sym PARENTS_WORD,
    clone = const libc::SYS_clone,
    kept_flags = const !libc::CLONE_CHILD_SETTID,
    not_now = const -libc::EAGAIN,
);

unsafe extern "C" {
    fn hecaton_follow();
    fn hecaton_follow_fork();
}

/// Where the system calls `clone` and `fork` of a bare program go on.
pub(crate) fn entries() -> (u64, u64) {
    (hecaton_follow as *const () as u64, hecaton_follow_fork as *const () as u64)
}

/// Must be called before the first fork.
pub(crate) fn prepare() {
    SEQUENCES_OFFSET.store(sequences_offset(), Relaxed);
}

fn sequences_offset() -> usize {
    // SAFETY: glibc 2.35 exports the two as constants of these types.
    unsafe {
        let offset = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_offset".as_ptr());
        let size = libc::dlsym(libc::RTLD_DEFAULT, c"__rseq_size".as_ptr());
        if offset.is_null() || size.is_null() || *size.cast::<u32>() == 0 {
            return 0;
        }
        *offset.cast::<usize>()
    }
}
