//! Keeps on the pool what a program starts with an environment of its own.
//!
//! The library and its pager are named by the environment, which a program may replace (`env -i`).
//! So libc's `execve`, which all of its `exec` functions and `posix_spawn` end in, its `execveat`
//! and `fexecve` add what is missing. An environment that is complete is passed on as it is, and so
//! is any of a process that is not attached: it cannot read all of its memory.
//!
//! This may run in a `vfork` child, on a small stack, and what it maps stays with the parent. So a
//! usual environment takes no memory but [`Room`].

mod environment;

use crate::{own, sys};
use environment::{Ours, Plan};
use hecaton_uffd::Errno;
use hecaton_uffd::sys::syscall;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::Ordering::Relaxed;

/// On the stack, of which glibc's `posix_spawn` has 32 KiB.
struct Room {
    pointers: [*const c_char; 256],
    bytes: [u8; 1024],
}

/// Copies of what the launcher has set: the program may change its own environment. C strings.
struct Kept {
    library: [u8; 1024],
    socket: [u8; 128],
    key: [u8; 64],
    largest_mapping: [u8; 64],
    local: [u8; 64],
}

#[unsafe(link_section = ".data")]
static mut KEPT: Kept = Kept {
    library: [0; 1024],
    socket: [0; 128],
    key: [0; 64],
    largest_mapping: [0; 64],
    local: [0; 64],
};

/// Notes the launcher's settings for the programs that this one starts. If a setting is too long,
/// those programs are not followed. Called before the program has a second thread.
pub(crate) fn prepare(
    socket: &CStr,
    key: Option<&CStr>,
    [largest_mapping, local]: [Option<&CStr>; 2],
) {
    // SAFETY: dladdr fills the structure where it succeeds; its name lasts as long as the library.
    let library = unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(prepare as *const () as *const libc::c_void, &raw mut info);
        if found == 0 || info.dli_fname.is_null() {
            return;
        }
        CStr::from_ptr(info.dli_fname)
    };
    let kept = &raw mut KEPT;
    // SAFETY: this is the only thread.
    let kept = unsafe { &mut *kept };
    let fits = note(&mut kept.socket, b"HECATON_PAGER=", socket)
        && key.is_none_or(|key| note(&mut kept.key, b"HECATON_KEY=", key))
        && largest_mapping.is_none_or(|largest| {
            note(&mut kept.largest_mapping, b"HECATON_LARGEST_MAPPING=", largest)
        })
        && local.is_none_or(|local| note(&mut kept.local, b"HECATON_LOCAL=", local));
    if fits {
        note(&mut kept.library, b"", library);
    }
}

/// False if it does not fit, with a zero at its end.
fn note(to: &mut [u8], name: &[u8], value: &CStr) -> bool {
    let value = value.to_bytes();
    let Some(to) = to.get_mut(..name.len() + value.len() + 1) else { return false };
    to[..name.len()].copy_from_slice(name);
    to[name.len()..name.len() + value.len()].copy_from_slice(value);
    true
}

fn ours() -> Option<Ours<'static>> {
    let kept = &raw const KEPT;
    // SAFETY: written by `prepare` only, before the program had a second thread.
    let kept = unsafe { &*kept };
    let text = |bytes: &'static [u8]| {
        let text = CStr::from_bytes_until_nul(bytes).ok()?;
        (!text.is_empty()).then_some(text)
    };
    Some(Ours {
        library: text(&kept.library)?.to_bytes(),
        socket: text(&kept.socket)?,
        others: [text(&kept.key), text(&kept.largest_mapping), text(&kept.local)],
    })
}

/// Calls `exec` with the environment completed. Returns only if that fails.
///
/// # Safety
/// `environment` is null or what `execve` takes, and `exec` starts a program with what it is given.
unsafe fn with_ours(environment: *const *const c_char, exec: impl Fn(usize) -> Errno) -> Errno {
    let as_it_is = environment as usize;
    let is_attached = own::attached().load(Relaxed) != 0;
    let Some(ours) = ours().filter(|_| is_attached) else { return exec(as_it_is) };
    // SAFETY: the caller's promise.
    let given = unsafe {
        match environment.is_null() {
            true => &[][..],
            false => {
                let count = (0..).take_while(|at| !(*environment.add(*at)).is_null()).count();
                std::slice::from_raw_parts(environment, count)
            }
        }
    };
    // SAFETY: the same.
    let plan = unsafe { Plan::new(given, ours) };
    if plan.is_empty() {
        return exec(as_it_is);
    }
    let mut room = Room { pointers: [std::ptr::null(); 256], bytes: [0; 1024] };
    let failed = if plan.write(&mut room.pointers, &mut room.bytes) {
        exec(room.pointers.as_ptr() as usize)
    } else {
        in_mapping(&plan, &exec)
    };
    // It is the program's environment that must not fail for ours.
    if failed == Errno(libc::E2BIG) { exec(as_it_is) } else { failed }
}

/// For an environment that [`Room`] is too small for.
fn in_mapping(plan: &Plan, exec: impl Fn(usize) -> Errno) -> Errno {
    let pointers = plan.pointers();
    let len = pointers * size_of::<usize>() + plan.bytes();
    let at = match sys::map_anonymous(len, libc::PROT_READ | libc::PROT_WRITE, 0) {
        Ok(at) => at,
        Err(errno) => return errno,
    };
    // SAFETY: a new mapping of that length, aligned for pointers; zeros are null pointers.
    unsafe {
        let words = std::slice::from_raw_parts_mut(at as *mut *const c_char, pointers);
        let bytes = (at + size_of_val(words)) as *mut u8;
        plan.write(words, std::slice::from_raw_parts_mut(bytes, plan.bytes()));
        let failed = exec(at);
        sys::unmap(at, len);
        failed
    }
}

/// The system call, which returns only if it fails.
///
/// # Safety
/// As for the system call.
unsafe fn call(number: libc::c_long, arguments: [usize; 6]) -> Errno {
    // SAFETY: the caller's promise.
    unsafe { syscall(number, arguments) }.err().unwrap_or(Errno(0))
}

fn fail(errno: Errno) -> c_int {
    // SAFETY: the calling thread's errno.
    unsafe { *libc::__errno_location() = errno.0 };
    -1
}

/// In the place of libc's.
pub(crate) unsafe extern "C" fn execve(
    path: *const c_char,
    words: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    let (path, words) = (path as usize, words as usize);
    // SAFETY: the caller's promises are those of execve.
    fail(unsafe {
        with_ours(environment, |environment| {
            call(libc::SYS_execve, [path, words, environment, 0, 0, 0])
        })
    })
}

/// In the place of libc's.
pub(crate) unsafe extern "C" fn execveat(
    dir: c_int,
    path: *const c_char,
    words: *const *const c_char,
    environment: *const *const c_char,
    flags: c_int,
) -> c_int {
    let (path, words) = (path as usize, words as usize);
    // SAFETY: the caller's promises are those of execveat.
    fail(unsafe {
        with_ours(environment, |environment| {
            let arguments = [dir as usize, path, words, environment, flags as usize, 0];
            call(libc::SYS_execveat, arguments)
        })
    })
}

/// In the place of libc's.
pub(crate) unsafe extern "C" fn fexecve(
    fd: c_int,
    words: *const *const c_char,
    environment: *const *const c_char,
) -> c_int {
    if fd < 0 || words.is_null() || environment.is_null() {
        return fail(Errno(libc::EINVAL));
    }
    // SAFETY: the caller's promises are those of fexecve.
    unsafe { execveat(fd, c"".as_ptr(), words, environment, libc::AT_EMPTY_PATH) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_noted() {
        let mut to = [0u8; 8];
        assert!(note(&mut to, b"A=", c"12345"));
        assert_eq!(&to, b"A=12345\0");
        assert!(!note(&mut to, b"A=", c"123456"));
    }
}
