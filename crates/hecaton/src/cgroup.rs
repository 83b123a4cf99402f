//! A memory cgroup of a command's own, which goes with it.

use crate::tools::eventually_even_if_interrupted;
use hecaton_memory::cgroup::{Group, Hierarchy};
use std::{ffi::OsStr, path::Path, process::Command};

/// The group; it is emptied and removed when it goes out of scope.
pub(crate) struct Cgroup(Group);

impl Cgroup {
    /// Makes a group that may use `limit` bytes of memory and as much swap as there is.
    pub(crate) fn new(name: &str, limit: u64) -> anyhow::Result<Self> {
        Ok(Self(Hierarchy::find()?.make(name, limit)?))
    }

    /// A command whose process enters the group before it becomes `program`: not a page of it is
    /// accounted elsewhere.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = entering(self.path());
        command.arg(program);
        command
    }

    /// The group's directory.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    /// Whether it has processes.
    pub(crate) fn is_in_use(&self) -> bool {
        self.0.members().is_ok_and(|members| !members.is_empty())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let removed = eventually_even_if_interrupted(|| {
            let _ = self.0.kill();
            self.0.remove()
        });
        if let Err(error) = removed {
            tracing::warn!(cgroup = %self.path().display(), %error, "cannot remove the cgroup");
        }
    }
}

/// A command that enters a group and becomes the program that is its first argument.
pub(crate) fn entering(group: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(group.join("cgroup.procs"));
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_member_is_limited_and_the_group_goes_away() {
        let cgroup = match Cgroup::new(&format!("hecaton-test-{}", std::process::id()), 64 << 20) {
            Ok(cgroup) => cgroup,
            Err(error) => return println!("skipped: a_member_is_limited: {error:#}"),
        };
        let path = cgroup.path().to_owned();
        let output = cgroup.command("cat").arg("/proc/self/cgroup").output().unwrap();
        let groups = String::from_utf8_lossy(&output.stdout).into_owned();
        let name = path.file_name().unwrap().to_string_lossy();
        assert!(groups.contains(&*name), "{groups}");
        drop(cgroup);
        assert!(!path.exists());
    }
}
