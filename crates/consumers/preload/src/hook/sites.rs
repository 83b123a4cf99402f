//! The places in libc where children are made, and what is put there in the place of the system
//! calls.
//!
//! libc's own text is changed, because its functions reach each other by internal names, and
//! because there is no later moment at which a fork could be followed: see [`crate::fork`]. The
//! clone in `_Fork` must be found, or the program does not run. `clone` and `syscall` are for
//! programs that go past `fork`; where they are not as expected, the children that they make are
//! not followed. `syscall` also tells of `MADV_WIPEONFORK`, and does `MADV_DODUMP` our way.

use crate::failure::Failure;
use crate::own::{IS_FILTERED, USES_WIPE_ON_FORK};
use hecaton_uffd::Errno;
use libc::c_void;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Where `_Fork`, `clone` and `syscall` go on.
#[unsafe(link_section = ".data")]
static BEHIND_FORK: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = ".data")]
static BEHIND_CLONE: AtomicUsize = AtomicUsize::new(0);
#[unsafe(link_section = ".data")]
static BEHIND_SYSCALL: AtomicUsize = AtomicUsize::new(0);

// Each is jumped to in the middle of a function, with a system call's arguments in its registers.
// r11 is a system call's to change.
//
// `clone3` is what a C library may not know of and a kernel may not have, so whoever wants it
// without libc can do with `clone`. Its arguments are looked at only if they are there at all:
// programs ask with none whether there is such a call.
std::arch::global_asm!(
    ".p2align 4",
    "hecaton_fork_site:",
    "lea r11, [rip + 2f]",
    "jmp hecaton_follow",
    "2:",
    "jmp qword ptr [rip + {behind_fork}]",
    ".p2align 4",
    "hecaton_clone_site:",
    "test edi, {shares_memory}",
    "jnz 3f",
    "lea r11, [rip + 4f]",
    "jmp hecaton_follow",
    "3:",
    "mov eax, {clone}",
    "syscall",
    "4:",
    "jmp qword ptr [rip + {behind_clone}]",
    ".p2align 4",
    "hecaton_syscall_site:",
    "cmp eax, {clone}",
    "je 6f",
    "cmp eax, {fork}",
    "je 7f",
    "cmp eax, {clone3}",
    "je 9f",
    "cmp eax, {seccomp}",
    "jne 4f",
    "mov dword ptr [rip + {is_filtered}], 1",
    "jmp 5f",
    "4:",
    "cmp eax, {madvise}",
    "jne 5f",
    "cmp edx, {let_dump}",
    "je 77f",
    "cmp edx, {wipe_on_fork}",
    "jne 5f",
    "mov dword ptr [rip + {uses_wipe_on_fork}], 1",
    "5:",
    "syscall",
    "55:",
    "cmp rax, -4095",
    "jmp qword ptr [rip + {behind_syscall}]",
    "6:",
    "test edi, {shares_memory}",
    "jnz 5b",
    "jmp 8f",
    "7:",
    "mov edi, {sigchld}",
    "xor esi, esi",
    "xor edx, edx",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "8:",
    "lea r11, [rip + 55b]",
    "jmp hecaton_follow",
    "9:",
    "cmp rsi, {clone3_least}",
    "jb 5b",
    "test rdi, rdi",
    "jz 5b",
    "test dword ptr [rdi], {shares_memory}",
    "jnz 5b",
    "mov rax, {unknown}",
    "jmp 55b",
    "77:",
    "lea rsp, [rsp - 128]",
    "push rbp",
    "mov rbp, rsp",
    "and rsp, -16",
    "call {let_cores_have}",
    "mov rsp, rbp",
    "pop rbp",
    "lea rsp, [rsp + 128]",
    "jmp 55b",
    behind_fork = sym BEHIND_FORK,
    behind_clone = sym BEHIND_CLONE,
    behind_syscall = sym BEHIND_SYSCALL,
    shares_memory = const libc::CLONE_VM,
    clone = const libc::SYS_clone,
    fork = const libc::SYS_fork,
    clone3 = const libc::SYS_clone3,
    madvise = const libc::SYS_madvise,
    seccomp = const libc::SYS_seccomp,
    is_filtered = sym IS_FILTERED,
    let_dump = const libc::MADV_DODUMP,
    let_cores_have = sym let_cores_have,
    wipe_on_fork = const libc::MADV_WIPEONFORK,
    uses_wipe_on_fork = sym USES_WIPE_ON_FORK,
    clone3_least = const 64,
    sigchld = const libc::SIGCHLD,
    unknown = const -libc::ENOSYS,
);

unsafe extern "C" {
    fn hecaton_fork_site();
    fn hecaton_clone_site();
    fn hecaton_syscall_site();
}

/// Returns what the system call would. Registers that a C function may change, `syscall` may, too.
extern "C" fn let_cores_have(start: usize, len: usize) -> isize {
    match super::cores::let_cores_have(start, len) {
        Ok(()) => 0,
        Err(errno) => -(errno.0 as isize),
    }
}

/// `mov $56, %eax; syscall`
const CLONE: &[u8] = &[0xb8, libc::SYS_clone as u8, 0, 0, 0, 0x0f, 0x05];

/// `syscall; cmp $-4095, %rax`
const ANY_CALL: &[u8] = &[0x0f, 0x05, 0x48, 0x3d, 0x01, 0xf0, 0xff, 0xff];

/// Bytes of a jump within 2 GiB.
const JUMP: usize = 5;

/// Most bytes of a function that is looked through.
const MAX_LEN: usize = 1024;

/// Replaces the system calls that make children.
///
/// # Safety
/// The handle is libc's, and the program has only this thread yet.
pub(crate) unsafe fn install(libc_handle: *mut c_void) -> Result<(), Failure> {
    let site = |name: &std::ffi::CStr, what, behind, site: unsafe extern "C" fn()| {
        // SAFETY: the caller's promise; the symbol is one of libc's functions, or null.
        unsafe {
            let function = libc::dlsym(libc_handle, name.as_ptr());
            replace(function, what, behind, site as *const () as usize)
        }
    };
    match site(c"_Fork", CLONE, &BEHIND_FORK, hecaton_fork_site) {
        None => {
            let what = "this C library's fork is not as expected (it takes glibc 2.34 or newer)";
            return Err(Failure(what, Errno(libc::ENOTSUP)));
        }
        Some(Err(errno)) => return Err(Failure("the C library's fork cannot be replaced", errno)),
        Some(Ok(())) => {}
    }
    // A function without the expected call, or that cannot be written, stays as it is.
    let _ = site(c"clone", CLONE, &BEHIND_CLONE, hecaton_clone_site);
    let _ = site(c"syscall", ANY_CALL, &BEHIND_SYSCALL, hecaton_syscall_site);
    Ok(())
}

/// Puts a jump to `target` in the place of the instructions `what`, and notes where they end.
/// `None` if they are not there exactly once, or are out of a jump's reach.
///
/// # Safety
/// `function` is null or a function of a library that stays loaded, and no thread runs it.
unsafe fn replace(
    function: *mut c_void,
    what: &[u8],
    behind: &AtomicUsize,
    target: usize,
) -> Option<Result<(), Errno>> {
    // SAFETY: the caller's promise; the function is as long as its symbol says.
    unsafe {
        let len = function_len(function)?;
        let code = std::slice::from_raw_parts(function.cast::<u8>(), len);
        let at = function as usize + only_place(code, what)?;
        let jump = jump_to(at, target)?;
        behind.store(at + what.len(), Relaxed);
        Some(super::patch::write_code(at, &jump))
    }
}

/// Where `what` is in `code`, if it is there once.
fn only_place(code: &[u8], what: &[u8]) -> Option<usize> {
    let mut places = code.windows(what.len()).enumerate().filter(|(_, bytes)| *bytes == what);
    let (at, _) = places.next()?;
    places.next().is_none().then_some(at)
}

/// `jmp` to a place within 2 GiB.
fn jump_to(from: usize, to: usize) -> Option<[u8; JUMP]> {
    let distance = (to as i64).wrapping_sub((from + JUMP) as i64);
    let distance = i32::try_from(distance).ok()?.to_le_bytes();
    Some([0xe9, distance[0], distance[1], distance[2], distance[3]])
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
        (1..=MAX_LEN).contains(&len).then_some(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_found_when_they_are_there_once() {
        let code = [&[0x90, 0x90][..], CLONE, &[0xc3]].concat();
        assert_eq!(only_place(&code, CLONE), Some(2));
        assert_eq!(only_place(&code, ANY_CALL), None);
        assert_eq!(only_place(&[CLONE, CLONE].concat(), CLONE), None);
    }

    #[test]
    fn jumps_are_from_their_own_end() {
        assert_eq!(jump_to(0x1000, 0x1005), Some([0xe9, 0, 0, 0, 0]));
        assert_eq!(jump_to(0x1000, 0x1000), Some([0xe9, 0xfb, 0xff, 0xff, 0xff]));
        assert_eq!(jump_to(0x1000, 0x1_0000_1005), None);
    }
}
