//! `fork`, told to the pager before it happens.
//!
//! Nothing of glibc's may run in a child before it is attached: `fork` itself puts malloc's arenas
//! and the open streams in order there, long before any handler of `pthread_atfork`, and what of
//! them is in the pool would read as zeros. So the clone inside of glibc's `_Fork`, a `mov` and a
//! `syscall`, is replaced by a jump to [`site`], which makes the same system call and in the child
//! returns once it is attached.
//!
//! Userfaultfd's own event for forks was rejected: it takes CAP_SYS_PTRACE in the program, and two
//! ways of following a fork are one too many. What is lost with it: a child made by a bare `clone`
//! system call past libc cannot be followed, and ends as soon as it maps memory through libc.
//!
//! Between the pager's word to go and the child's attachment no page of the program's may be
//! touched, because no fault is served: the parent's are held back so that its memory, the pager's
//! tables and the child agree, and the child has none yet. So all of it runs on a stack of the
//! library's own, with signals blocked. What the kernel itself writes in the child before its first
//! instruction is the thread's id, which is left out and written later, and the restartable
//! sequence's processor number, whose page must be in memory.

use crate::attach::{self, Failure};
use crate::{own, sys};
use hecaton_uffd::Errno;
use libc::c_void;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// 1 while a thread of this process forks.
#[unsafe(link_section = ".data")]
static FORKING: AtomicU32 = AtomicU32::new(0);
/// Threads that are making a mapping.
#[unsafe(link_section = ".data")]
static MAPPING: AtomicU32 = AtomicU32::new(0);
/// The forking thread's signal mask; guarded by `FORKING`, like the next two.
#[unsafe(link_section = ".data")]
static MASK: AtomicU64 = AtomicU64::new(0);
#[unsafe(link_section = ".data")]
static CONNECTION: AtomicI32 = AtomicI32::new(-1);
/// The page to which the kernel writes in the forking thread's memory whenever it runs; 0: none.
#[unsafe(link_section = ".data")]
static WRITTEN_PAGE: AtomicUsize = AtomicUsize::new(0);
/// Where `_Fork` goes on.
#[unsafe(link_section = ".data")]
static BEHIND_SITE: AtomicUsize = AtomicUsize::new(0);
/// From a thread's pointer to its area of restartable sequences; 0: none.
#[unsafe(link_section = ".data")]
static SEQUENCES_OFFSET: AtomicUsize = AtomicUsize::new(0);

/// Held while a mapping is made: no fork comes in between.
///
/// A mapping that takes the place of one just unmapped would otherwise leave it open, for the
/// pager, whether the child's is the old or the new one. Unmapping and moving need no such care:
/// they show in what the child has mapped.
pub(crate) struct MappingHeld(());

impl MappingHeld {
    pub(crate) fn new() -> MappingHeld {
        loop {
            MAPPING.fetch_add(1, Ordering::SeqCst);
            if FORKING.load(Ordering::SeqCst) == 0 {
                return MappingHeld(());
            }
            MAPPING.fetch_sub(1, Ordering::SeqCst);
            sys::wait_while(&FORKING, 1, 1000);
        }
    }
}

impl Drop for MappingHeld {
    fn drop(&mut self) {
        MAPPING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// How long a fork waits for threads that are making a mapping. It is over in microseconds, except
/// when a signal handler forks in the middle of one, which would wait for itself.
const MAPPING_PATIENCE_MS: u64 = 100;

/// How often a fork is announced anew because a page was evicted just before.
const TRIES: usize = 16;

const ALL_SIGNALS: u64 = u64::MAX;

/// On the program's stack: gets hold of the library's. Returns the end of that.
extern "C" fn enter() -> usize {
    let mask = sys::set_signal_mask(ALL_SIGNALS);
    while FORKING.swap(1, Ordering::SeqCst) != 0 {
        sys::wait_while(&FORKING, 1, 1000);
    }
    MASK.store(mask, Ordering::Relaxed);
    for _ in 0..MAPPING_PATIENCE_MS {
        if MAPPING.load(Ordering::SeqCst) == 0 {
            break;
        }
        sys::sleep_ms(1);
    }
    let offset = SEQUENCES_OFFSET.load(Ordering::Relaxed);
    let page = match offset {
        0 => 0,
        _ => thread_pointer().wrapping_add(offset) & !(own::PAGE - 1),
    };
    WRITTEN_PAGE.store(page, Ordering::Relaxed);
    own::fork_stack_top()
}

fn thread_pointer() -> usize {
    let pointer: usize;
    // SAFETY: by the ABI the first word at fs is its own address.
    unsafe {
        std::arch::asm!("mov {}, fs:0", out(reg) pointer, options(nostack, readonly));
    }
    pointer
}

/// On the library's stack: has the pager get ready. Returns the child's connection, or -1.
extern "C" fn begin() -> RawFd {
    attach::end_if_copied_unseen();
    for _ in 0..TRIES {
        let page = WRITTEN_PAGE.load(Ordering::Relaxed);
        if page != 0 {
            // SAFETY: a page of the thread's own memory.
            unsafe { (page as *const u8).read_volatile() };
        }
        match attach::announce_fork() {
            Ok(connection) if page == 0 || sys::is_resident(page) => {
                CONNECTION.store(connection, Ordering::Relaxed);
                return connection;
            }
            // Evicted between the two.
            Ok(connection) => sys::close(connection),
            Err(failure) => {
                failure.report();
                return -1;
            }
        }
    }
    -1
}

/// In the parent, still on the library's stack, whether there is a child or not.
extern "C" fn in_parent() {
    sys::close(CONNECTION.swap(-1, Ordering::Relaxed));
}

/// In the child, on the library's stack: attaches, and does what the kernel was not let do.
extern "C" fn in_child(flags: u64, thread_id_at: *mut i32) {
    MAPPING.store(0, Ordering::Relaxed);
    if let Err(failure) = attach::child(CONNECTION.swap(-1, Ordering::Relaxed)) {
        failure.report_and_exit();
    }
    if flags & libc::CLONE_CHILD_SETTID as u64 != 0 {
        // SAFETY: `_Fork` names its thread's own word.
        unsafe { thread_id_at.write_volatile(sys::thread_id()) };
    }
}

/// Back on the program's stack, in both.
extern "C" fn leave() {
    let mask = MASK.load(Ordering::Relaxed);
    FORKING.store(0, Ordering::SeqCst);
    sys::wake_all(&FORKING);
    sys::set_signal_mask(mask);
}

// Stands for `mov $56, %eax; syscall` in the middle of a function: all registers are as before,
// except those that a system call changes (rax, rcx, r11, flags). The 128 bytes below the stack
// pointer may be in use, which is why it is jumped to, not called, and why it steps over them.
//
// rbx: the program's stack. rbp, r12 to r15: the system call's arguments, because the stack they
// were saved on must not be touched between `begin` and the return from `in_child`.
std::arch::global_asm!(
    ".p2align 4",
    "hecaton_fork_site:",
    "endbr64",
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
    "mov rbx, rsp",
    "mov r12, rdi",
    "mov r13, rsi",
    "mov r14, rdx",
    "mov r15, r10",
    "mov rbp, r8",
    "sub rsp, 512",
    "and rsp, -64",
    "fxsave64 [rsp]",
    "call {enter}",
    "mov rsp, rax",
    "call {begin}",
    "test eax, eax",
    "js 2f",
    "mov rdi, r12",
    "and rdi, {kept_flags}",
    "mov rsi, r13",
    "mov rdx, r14",
    "mov r10, r15",
    "mov r8, rbp",
    "mov eax, {clone}",
    "syscall",
    "test rax, rax",
    "jz 3f",
    "mov r12, rax",
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
    "jmp qword ptr [rip + {behind}]",
    enter = sym enter,
    begin = sym begin,
    in_parent = sym in_parent,
    in_child = sym in_child,
    leave = sym leave,
    behind = sym BEHIND_SITE,
    clone = const libc::SYS_clone,
    kept_flags = const !libc::CLONE_CHILD_SETTID,
    not_now = const -libc::EAGAIN,
);

unsafe extern "C" {
    fn hecaton_fork_site();
}

/// `mov $56, %eax; syscall`
const CLONE: [u8; 7] = [0xb8, libc::SYS_clone as u8, 0, 0, 0, 0x0f, 0x05];

/// Most bytes of a `_Fork` that is looked through.
const MAX_LEN: usize = 1024;

/// Replaces the clone in `_Fork`.
///
/// # Safety
/// `_Fork` is libc's, or null, and the program has only this thread yet.
pub(crate) unsafe fn install(libc_handle: *mut c_void) -> Result<(), Failure> {
    let unknown = || {
        let what = "this C library's fork is not as expected (it takes glibc 2.34 or newer)";
        Failure(what, Errno(libc::ENOTSUP))
    };
    // SAFETY: the caller's promise; the function is as long as its symbol says.
    unsafe {
        let function = libc::dlsym(libc_handle, c"_Fork".as_ptr());
        let len = function_len(function).ok_or_else(unknown)?;
        let code = std::slice::from_raw_parts(function.cast::<u8>(), len);
        let at = only_clone(code).ok_or_else(unknown)?;
        let site = function as usize + at;
        let jump = jump_to(site, hecaton_fork_site as *const () as usize).ok_or_else(unknown)?;
        BEHIND_SITE.store(site + CLONE.len(), Ordering::Relaxed);
        SEQUENCES_OFFSET.store(sequences_offset(), Ordering::Relaxed);
        crate::hook::write_code(site, &jump)
            .map_err(|errno| Failure("the C library's fork cannot be replaced", errno))
    }
}

/// The place of the only clone in a function.
fn only_clone(code: &[u8]) -> Option<usize> {
    let mut places = code.windows(CLONE.len()).enumerate().filter(|(_, bytes)| *bytes == CLONE);
    let (at, _) = places.next()?;
    places.next().is_none().then_some(at)
}

/// `jmp` to a place within 2 GiB, and two bytes that are never reached.
fn jump_to(from: usize, to: usize) -> Option<[u8; 7]> {
    let distance = (to as i64).wrapping_sub(from as i64 + 5);
    let distance = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, distance[0], distance[1], distance[2], distance[3], 0x0f, 0x0b])
}

/// How long a function is, by its symbol.
unsafe fn function_len(function: *mut c_void) -> Option<usize> {
    unsafe extern "C" {
        fn dladdr1(
            address: *const c_void,
            info: *mut libc::Dl_info,
            extra: *mut *const c_void,
            flags: i32,
        ) -> i32;
    }
    const RTLD_DL_SYMENT: i32 = 1;
    if function.is_null() {
        return None;
    }
    let mut symbol: *const c_void = std::ptr::null();
    // SAFETY: the loader fills both, and its symbol tables stay mapped.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = dladdr1(function, &raw mut info, &raw mut symbol, RTLD_DL_SYMENT);
        if found == 0 || symbol.is_null() {
            return None;
        }
        let len = (*symbol.cast::<libc::Elf64_Sym>()).st_size as usize;
        (CLONE.len()..=MAX_LEN).contains(&len).then_some(len)
    }
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
