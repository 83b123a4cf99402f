//! `libhecaton.so`: hands a program's memory to its pager.
//!
//! Preloaded into an unmodified program, it opens a userfaultfd before `main`, and registers the
//! program's anonymous memory with it. It passes the userfaultfd to the pager named by
//! `HECATON_PAGER`. It starts a small helper that moves pages out on the pager's command: only a
//! process with the same memory may. In a hypervisor (`HECATON_GUEST_RAM` instead) it hands over
//! guest RAM only: see [`hypervisor`]. A hypervisor that libvirt starts asks the node for its pager
//! first. Memory that the program maps later is registered as it is mapped ([`hook`]); a forked
//! child attaches itself before anything else runs in it ([`fork`]). The launcher itself puts the
//! library into a program without glibc, and [`bare`] runs there.
//!
//! Code here runs inside somebody else's program: under its allocator's locks, in its children, in
//! a thread without thread-local storage. So nothing allocates, nothing panics, and all system
//! calls are raw.
//!
//! It replaces machine code of the C library's, and knows only x86-64's. Elsewhere the library is
//! empty, and `hecaton run` refuses before it would be used.

#![cfg(target_arch = "x86_64")]

mod attach;
mod bare;
mod exec;
mod failure;
mod fork;
mod front;
mod helper;
mod hook;
mod hypervisor;
mod maps;
mod own;
mod reach;
mod sys;
mod turn;
mod withhold;

use failure::Failure;
use hecaton_uffd::Errno;

/// Runs when the dynamic loader has mapped the library, before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    if let Some(path) = variable(c"HECATON_GUEST_RAM") {
        if !hypervisor::guest::prepare(path.to_bytes()) || !hook::install_in_hypervisor() {
            Failure::HYPERVISOR.report_and_exit();
        }
        return;
    }
    if let (Some(node), Some(request)) = (variable(c"HECATON_NODE"), variable(c"HECATON_VM")) {
        if !hypervisor::launch::prepare(node.to_bytes(), request.to_bytes())
            || !hook::install_in_hypervisor()
        {
            Failure::HYPERVISOR.report_and_exit();
        }
        return;
    }
    let Some(path) = variable(c"HECATON_PAGER") else { return };
    if is_emulated() {
        let why = Failure("valgrind does not show the program's memory", Errno(libc::ENOTSUP));
        return why.report_with(STAYS_LOCAL);
    }
    front::prepare();
    let limits = [variable(c"HECATON_LARGEST_MAPPING"), variable(c"HECATON_LOCAL")];
    hook::limit(limits);
    let key = variable(c"HECATON_KEY");
    exec::prepare(path, key, limits);
    let fresh = match attach::fresh(path.to_bytes(), key) {
        Ok(fresh) => fresh,
        Err(failure) if is_the_launchers(variable(c"HECATON_LAUNCHER")) => {
            failure.report_and_exit()
        }
        Err(failure) => return failure.report_with(STAYS_LOCAL),
    };
    if let Err(failure) = attach::begin(fresh).and_then(|()| hook::install()) {
        failure.report_and_exit();
    }
    // A program that this process calls by `exec` is not the launcher's program.
    // SAFETY: no thread of the program runs yet.
    unsafe { libc::unsetenv(c"HECATON_LAUNCHER".as_ptr()) };
}

const STAYS_LOCAL: &str = "this program stays on local memory";

/// Whether valgrind runs the program: its processes do not share memory as this library asks.
fn is_emulated() -> bool {
    let preloaded = variable(c"LD_PRELOAD").map_or(&b""[..], |list| list.to_bytes());
    preloaded.windows(VALGRIND.len()).any(|part| part == VALGRIND)
}

/// Begins the names of the libraries that valgrind preloads.
const VALGRIND: &[u8] = b"vgpreload_";

/// Whether this is the program that the launcher, with this process number, has started. Programs
/// that it starts may not be able to reach the pager: in a sandbox, or as another user.
fn is_the_launchers(launcher: Option<&std::ffi::CStr>) -> bool {
    // SAFETY: no arguments, no memory.
    let parent = unsafe { libc::getppid() };
    launcher.is_some_and(|number| {
        number.to_str().ok().and_then(|text| text.parse().ok()) == Some(parent)
    })
}

fn variable(name: &std::ffi::CStr) -> Option<&'static std::ffi::CStr> {
    // SAFETY: getenv's string lives as long as the environment is not changed, and no thread of
    // the program runs yet.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| std::ffi::CStr::from_ptr(value))
    }
}
