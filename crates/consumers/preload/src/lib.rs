//! `libhecaton.so`: hands a program's memory to its pager.
//!
//! Preloaded into an unmodified program, it opens a userfaultfd before `main`, registers the
//! program's anonymous memory with it, passes it to the pager named by `HECATON_PAGER`, and starts
//! one small helper thread that moves pages out on the pager's command: no other process may. In a
//! hypervisor (`HECATON_GUEST_RAM` instead) it hands over guest RAM only: see [`hypervisor`]. One
//! that libvirt starts asks the node for its pager first. Memory that the program maps later is
//! registered as it is mapped ([`hook`]); a forked child attaches itself before anything else runs
//! in it ([`fork`]).
//!
//! Code here runs inside somebody else's program: under its allocator's locks, in its children, in
//! a thread without thread-local storage. So nothing allocates, nothing panics, and all system
//! calls are raw.
//!
//! It replaces machine code of the C library's, and knows only x86-64's. Elsewhere the library is
//! empty, and `hecaton run` refuses before it would be used.

#![cfg(target_arch = "x86_64")]

mod attach;
mod exec;
mod fork;
mod helper;
mod hook;
mod hypervisor;
mod maps;
mod own;
mod room;
mod sites;
mod sys;
mod turn;
mod withhold;

/// Runs when the dynamic loader has mapped the library, before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

extern "C" fn constructor() {
    if let Some(path) = variable(c"HECATON_GUEST_RAM") {
        if !hypervisor::guest::prepare(path.to_bytes()) || !hook::install_in_hypervisor() {
            attach::Failure::HYPERVISOR.report_and_exit();
        }
        return;
    }
    if let (Some(node), Some(request)) = (variable(c"HECATON_NODE"), variable(c"HECATON_VM")) {
        if !hypervisor::launch::prepare(node.to_bytes(), request.to_bytes())
            || !hook::install_in_hypervisor()
        {
            attach::Failure::HYPERVISOR.report_and_exit();
        }
        return;
    }
    let Some(path) = variable(c"HECATON_PAGER") else { return };
    let largest_mapping = variable(c"HECATON_LARGEST_MAPPING");
    room::limit(largest_mapping);
    exec::prepare(path, largest_mapping);
    if let Err(failure) = attach::fresh(path.to_bytes()).and_then(|()| hook::install()) {
        failure.report_and_exit();
    }
}

fn variable(name: &std::ffi::CStr) -> Option<&'static std::ffi::CStr> {
    // SAFETY: getenv's string lives as long as the environment is not changed, and no thread of
    // the program runs yet.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| std::ffi::CStr::from_ptr(value))
    }
}
