//! A memory cgroup with a limit, of either version of the interface.

use crate::tools::{eventually_even_if_interrupted, tool};
use anyhow::{Context as _, bail};
use std::{
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

enum Version {
    V1,
    V2,
}

/// The group; it is emptied and removed when it goes out of scope.
pub(crate) struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes a group that may use `limit` bytes of memory and as much swap as there is.
    pub(crate) fn new(name: &str, limit: u64) -> anyhow::Result<Self> {
        let (parent, version) = memory_controller()?;
        let path = parent.join(name);
        fs::create_dir(&path)
            .with_context(|| format!("cannot make the memory cgroup {}", path.display()))?;
        let cgroup = Self { path };
        match version {
            Version::V1 => cgroup.set("memory.limit_in_bytes", limit)?,
            Version::V2 => {
                cgroup.set("memory.max", limit)?;
                cgroup.set("memory.swap.max", "max")?;
            }
        }
        Ok(cgroup)
    }

    fn set(&self, file: &str, value: impl ToString) -> anyhow::Result<()> {
        let path = self.path.join(file);
        let value = value.to_string();
        fs::write(&path, &value)
            .with_context(|| format!("cannot set {} to {value}", path.display()))
    }

    /// A command whose process enters the group before it becomes `program`: not a page of it is
    /// accounted elsewhere.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = entering(&self.path);
        command.arg(program);
        command
    }

    /// The group's directory.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it has processes.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.members().is_empty()
    }

    fn members(&self) -> Vec<String> {
        let list = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        list.lines().map(str::to_owned).collect()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let removed = eventually_even_if_interrupted(|| {
            for id in self.members() {
                let _ = tool("kill", &["-KILL", &id]);
            }
            fs::remove_dir(&self.path)
        });
        if let Err(error) = removed {
            tracing::warn!(cgroup = %self.path.display(), %error, "cannot remove the cgroup");
        }
    }
}

/// A command that enters a group and becomes the program that is its first argument.
pub(crate) fn entering(group: &Path) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", r#"echo $$ > "$0" && exec "$@""#]).arg(group.join("cgroup.procs"));
    command
}

fn memory_controller() -> anyhow::Result<(PathBuf, Version)> {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("memory/memory.limit_in_bytes").exists() {
        return Ok((root.join("memory"), Version::V1));
    }
    let controllers = fs::read_to_string(root.join("cgroup.controllers")).unwrap_or_default();
    if !controllers.split_whitespace().any(|name| name == "memory") {
        bail!("there is no memory cgroup controller under {}", root.display());
    }
    let enabled = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap_or_default();
    if !enabled.split_whitespace().any(|name| name == "memory") {
        fs::write(root.join("cgroup.subtree_control"), "+memory")
            .context("cannot enable the memory controller in /sys/fs/cgroup")?;
    }
    Ok((root.to_owned(), Version::V2))
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
        let path = cgroup.path.clone();
        let output = cgroup.command("cat").arg("/proc/self/cgroup").output().unwrap();
        let groups = String::from_utf8_lossy(&output.stdout).into_owned();
        let name = path.file_name().unwrap().to_string_lossy();
        assert!(groups.contains(&*name), "{groups}");
        drop(cgroup);
        assert!(!path.exists());
    }
}
