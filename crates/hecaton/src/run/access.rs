//! Whether this user may have page faults handled at all.

use anyhow::bail;
use hecaton_uffd::abi::PAGER_FEATURES;
use hecaton_uffd::{Errno, Uffd};
use std::fs::File;
use std::os::fd::FromRawFd;

/// How the right is granted.
const GRANT: &str = "as root, run `sysctl vm.unprivileged_userfaultfd=1`, or give the user access \
    to /dev/userfaultfd (`chmod 666 /dev/userfaultfd`, or a udev rule with a group), or run this \
    command as root; in a container, its seccomp profile must allow userfaultfd";

/// Returns the help text on this right.
pub(crate) fn help() -> String {
    format!(
        "This needs userfaultfd, for page faults inside system calls too. Where it is missing: \
         {GRANT}. The node must run as the same user, and kernel.yama.ptrace_scope be 0 or 1. No \
         capability is needed."
    )
}

/// Tries what `libhecaton.so` will do in the program, and says how to grant it if it fails.
pub(super) fn check() -> anyhow::Result<()> {
    if cfg!(not(target_arch = "x86_64")) {
        bail!("programs run on the pool on x86-64 only, at present; donors and nodes run anywhere");
    }
    let uffd = match Uffd::open() {
        Ok(uffd) => uffd,
        Err(errno) => bail!("{}", explain(errno)),
    };
    let negotiated = uffd.api(PAGER_FEATURES);
    // SAFETY: the descriptor was just opened and nothing else owns it.
    drop(unsafe { File::from_raw_fd(uffd.0) });
    match negotiated {
        Ok(_) => Ok(()),
        Err(errno) => bail!("{}", explain_features(errno)),
    }
}

/// As [`check`], for a virtual machine: what is paged there is shared memory, and no fork is
/// followed.
pub(super) fn check_guest() -> anyhow::Result<()> {
    match Uffd::open() {
        // SAFETY: the descriptor was just opened and nothing else owns it.
        Ok(uffd) => drop(unsafe { File::from_raw_fd(uffd.0) }),
        Err(errno) => bail!("{}", explain(errno)),
    }
    Ok(())
}

fn explain_features(errno: Errno) -> String {
    format!(
        "this kernel's userfaultfd lacks what paging needs ({}): it takes Linux 6.1 or newer",
        std::io::Error::from(errno)
    )
}

fn explain(errno: Errno) -> String {
    let cause = std::io::Error::from(errno);
    match errno.0 {
        libc::EPERM | libc::EACCES | libc::ENOENT => {
            format!("this user may not handle page faults (userfaultfd: {cause}); {GRANT}")
        }
        libc::ENOSYS => {
            "this kernel has no userfaultfd: it needs Linux 6.1 or newer with CONFIG_USERFAULTFD"
                .to_owned()
        }
        _ => format!("userfaultfd cannot be opened: {cause}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_and_how_to_grant_it_is_said() {
        assert!(explain(Errno(libc::EPERM)).contains("vm.unprivileged_userfaultfd=1"));
        assert!(explain(Errno(libc::EACCES)).contains("/dev/userfaultfd"));
        assert!(explain_features(Errno(libc::EINVAL)).contains("Linux 6.1"));
        assert!(explain(Errno(libc::ENOSYS)).contains("CONFIG_USERFAULTFD"));
        assert!(explain(Errno(libc::EMFILE)).contains("Too many open files"));
    }
}
