//! Makes children without libc's `fork`, and goes on in them: a child must see memory as of the
//! fork, or end; it must never see anything else.
//!
//! `bare-children PAGES HOW`: HOW is `syscall-fork`, `syscall-clone` or `clone`, which libc has a
//! hand in; `clone3`, which must be refused; or `instruction`, which nobody sees. Between them
//! libc's own forks, whose children must have all that the program lets them have, and no more.

use hecaton_e2e::{Checked, Random, number_argument};
use std::{
    arch::asm,
    os::fd::{FromRawFd as _, OwnedFd},
    process::exit,
};

/// Exit status of a child that found wrong memory.
const WRONG: i32 = 77;

fn main() {
    let pages = number_argument(1);
    let how = std::env::args().nth(2).expect("how");
    let mut memory = Checked::new(1, pages);
    (0..pages).for_each(|page| memory.write(page));
    if how == "clone3" {
        let arguments = [0_u64, 0, 0, 0, libc::SIGCHLD as u64, 0, 0, 0];
        // SAFETY: the kernel reads the arguments, of which there are eight words.
        let made = unsafe { libc::syscall(libc::SYS_clone3, arguments.as_ptr(), 64) };
        let error = std::io::Error::last_os_error().raw_os_error();
        assert_eq!((made, error), (-1, Some(libc::ENOSYS)));
        println!("refused");
        return;
    }
    let kept = keep_from_children();
    for round in 0..2 {
        let child = make(&how, &mut memory);
        let mut random = Random(round);
        for _ in 0..pages / 2 {
            memory.write(random.below(pages));
        }
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(waited, child, "cannot wait: {}", std::io::Error::last_os_error());
        let (signal, code) = (status & 0x7f, status >> 8);
        match how.as_str() {
            "instruction" => assert_eq!((signal, code), (libc::SIGSEGV, 0), "{status:#x}"),
            _ => assert_eq!(status, 0, "child {child} ended with wait status {status:#x}"),
        }
        memory.verify_all();
        // A fork that is followed has everything again, whatever was before it.
        // SAFETY: the process has one thread, so the child's copy of every lock is free.
        match unsafe { libc::fork() } {
            0 => {
                assert!(is_mapped(kept) && !is_mapped(kept + PAGE) && is_mapped(kept + 2 * PAGE));
                in_child(&mut memory)
            }
            child => {
                // SAFETY: as above.
                let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!((waited, status), (child, 0));
            }
        }
        assert!(is_mapped(kept + PAGE));
    }
    println!("verified");
}

const PAGE: usize = 4096;

/// Three pages, of which children must not have the second.
fn keep_from_children() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice, and a page of it.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), 3 * PAGE, protection, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::madvise(at, 3 * PAGE, libc::MADV_DONTFORK), 0);
        assert_eq!(libc::madvise(at, 3 * PAGE, libc::MADV_DOFORK), 0);
        assert_eq!(libc::madvise(at.add(PAGE), PAGE, libc::MADV_DONTFORK), 0);
        at as usize
    }
}

fn is_mapped(page: usize) -> bool {
    let mut here = 0_u8;
    // SAFETY: one byte for one page.
    unsafe { libc::mincore(page as *mut libc::c_void, PAGE, &raw mut here) == 0 }
}

/// Ends the calling process, which is a child.
fn in_child(memory: &mut Checked) -> ! {
    let seen = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        memory.verify_all();
        (0..memory.pages()).step_by(3).for_each(|page| memory.write(page));
        memory.verify_all();
    }));
    exit(if seen.is_ok() { 0 } else { WRONG });
}

extern "C" fn in_child_on_its_stack(memory: *mut libc::c_void) -> libc::c_int {
    // SAFETY: what `make` has given along, of which the child has a copy.
    in_child(unsafe { &mut *memory.cast::<Checked>() })
}

/// The child's number, in the parent only.
fn make(how: &str, memory: &mut Checked) -> libc::pid_t {
    let mut number = 0;
    let made = match how {
        // SAFETY: the process has one thread; the child ends within `in_child`.
        "syscall-fork" => unsafe { libc::syscall(libc::SYS_fork) as libc::pid_t },
        // SAFETY: as above; the kernel writes the child's number where it is told to.
        "syscall-clone" => unsafe {
            let flags = libc::SIGCHLD | libc::CLONE_PARENT_SETTID | libc::CLONE_CHILD_SETTID;
            let at = &raw mut number;
            let child = libc::syscall(libc::SYS_clone, flags, 0, at, at, 0) as libc::pid_t;
            let expected = if child == 0 { libc::getpid() } else { child };
            assert_eq!(at.read_volatile(), expected, "the number is not where it was asked for");
            child
        },
        "clone" => {
            // On memory that may be in the pool.
            let mut stack = vec![0_u8; 1 << 20];
            let flags = libc::SIGCHLD | libc::CLONE_PIDFD;
            let (end, memory) = (stack.as_mut_ptr().wrapping_add(stack.len()), &raw mut *memory);
            // SAFETY: the stack is the child's copy of it; the kernel writes a descriptor to
            // `number`.
            unsafe {
                let entry = in_child_on_its_stack;
                let child = libc::clone(entry, end.cast(), flags, memory.cast(), &raw mut number);
                assert!(child > 0, "{}", std::io::Error::last_os_error());
                drop(OwnedFd::from_raw_fd(number));
                child
            }
        }
        // SAFETY: as for `syscall-fork`.
        "instruction" => unsafe {
            let mut result = libc::SYS_fork;
            asm!("syscall", inout("rax") result, out("rcx") _, out("r11") _);
            result as libc::pid_t
        },
        other => panic!("how is {other}?"),
    };
    match made {
        0 => in_child(memory),
        -1 => panic!("no child: {}", std::io::Error::last_os_error()),
        child => child,
    }
}
