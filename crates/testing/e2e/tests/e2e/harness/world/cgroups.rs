//! Cgroups of one world: groups below the runner's own, which look like roots from inside.

use super::{super::wait::until, PREFIX};
use anyhow::Context as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use std::{
    env,
    ffi::CString,
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

/// Which groups there are, for processes of the world: `WHERE=GROUP`, with colons between.
const GROUPS: &str = "HECATON_E2E_CGROUPS";

/// Controllers that tests use. Hierarchies of others stay as they are.
const CONTROLLERS: [&str; 2] = ["memory", "cpu"];

/// A hierarchy: where it is mounted, which one that is, and which group of it this process is in.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hierarchy {
    mounted_at: PathBuf,
    /// `None` for version 2.
    controllers: Option<String>,
    own: PathBuf,
}

/// The hierarchies that tests use, as /proc/self/mountinfo and /proc/self/cgroup tell.
fn hierarchies(mountinfo: &str, cgroup: &str) -> Vec<Hierarchy> {
    let of_mount = |line: &str| {
        let (before, after) = line.split_once(" - ")?;
        let before: Vec<&str> = before.split(' ').collect();
        let (root, mounted_at) = (*before.get(3)?, PathBuf::from(before.get(4)?));
        let mut after = after.split(' ');
        let (kind, options) = (after.next()?, after.nth(1)?);
        let version_2 = match kind {
            "cgroup" => false,
            // Beside hierarchies of version 1 it has no controllers that matter.
            "cgroup2" if mounted_at == Path::new("/sys/fs/cgroup") => true,
            _ => return None,
        };
        let has = |controllers: &str| {
            let mut controllers = controllers.split(',');
            controllers.any(|controller| CONTROLLERS.contains(&controller))
        };
        if !version_2 && !has(options) {
            return None;
        }
        let group = cgroup.lines().find_map(|line| {
            let (_, line) = line.split_once(':')?;
            let (controllers, path) = line.split_once(':')?;
            let is_it = if version_2 {
                controllers.is_empty()
            } else {
                let mut controllers = controllers.split(',');
                controllers.all(|one| !one.is_empty() && options.split(',').any(|of| of == one))
            };
            is_it.then_some((controllers, path))
        })?;
        let below = Path::new(group.1).strip_prefix(root).ok()?;
        let controllers = (!version_2).then(|| group.0.to_owned());
        Some(Hierarchy { own: mounted_at.join(below), mounted_at, controllers })
    };
    mountinfo.lines().filter_map(of_mount).collect()
}

fn hierarchies_here() -> anyhow::Result<Vec<Hierarchy>> {
    let read = |file: &str| fs::read_to_string(file).context(file.to_owned());
    Ok(hierarchies(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?))
}

/// The groups of one world. A machine that lets this user make none has none.
pub(crate) struct Groups(Vec<(Hierarchy, PathBuf)>);

impl Groups {
    /// Makes the groups of the world that has this directory.
    pub(crate) fn create(world: &Path) -> anyhow::Result<Self> {
        let name = world.file_name().context("the directory has no name")?;
        let mut groups = Vec::new();
        for hierarchy in hierarchies_here()? {
            let group = hierarchy.own.join(name);
            if fs::create_dir(&group).is_ok() {
                groups.push((hierarchy, group));
            }
        }
        Ok(Self(groups))
    }

    /// Tells a process of the world.
    pub(crate) fn name_to(&self, command: &mut Command) {
        let pairs = self.0.iter().map(|(at, group)| {
            let controllers = at.controllers.as_deref().unwrap_or_default();
            format!("{}={controllers}={}", at.mounted_at.display(), group.display())
        });
        command.env(GROUPS, pairs.collect::<Vec<_>>().join(":"));
    }

    /// The groups that this process was told of.
    pub(crate) fn named() -> anyhow::Result<Self> {
        let told = env::var(GROUPS).context("no cgroups are named")?;
        let groups = told.split(':').filter(|pair| !pair.is_empty()).map(|pair| {
            let mut parts = pair.split('=');
            let mut part = || parts.next().context("a part of a cgroup's name is missing");
            let (mounted_at, controllers) = (PathBuf::from(part()?), part()?);
            let group = PathBuf::from(part()?);
            let controllers = (!controllers.is_empty()).then(|| controllers.to_owned());
            let own = group.parent().context("a group has a parent")?.to_owned();
            Ok((Hierarchy { mounted_at, controllers, own }, group))
        });
        Ok(Self(groups.collect::<anyhow::Result<_>>()?))
    }

    /// This process is in the groups from now on.
    pub(crate) fn enter(&self) -> anyhow::Result<()> {
        for (_, group) in &self.0 {
            let procs = group.join("cgroup.procs");
            fs::write(&procs, "0").with_context(|| procs.display().to_string())?;
        }
        Ok(())
    }

    /// Mounts the hierarchies anew, in a mount and a cgroup namespace of this process's own: the
    /// group that it is in becomes the root.
    pub(crate) fn mount(&self) -> anyhow::Result<()> {
        for (at, _) in &self.0 {
            let mounted_at = &at.mounted_at;
            unmount(mounted_at, UnmountFlags::DETACH)
                .with_context(|| mounted_at.display().to_string())?;
            let (kind, options) = match &at.controllers {
                Some(controllers) => ("cgroup", Some(CString::new(controllers.as_str())?)),
                None => ("cgroup2", None),
            };
            mount("cgroup", mounted_at, kind, MountFlags::empty(), options.as_deref())
                .with_context(|| format!("{kind} at {}", mounted_at.display()))?;
        }
        Ok(())
    }
}

/// Removes the groups of a world whose processes have ended, and those that its tests made in them.
pub(crate) fn remove(world: &Path) {
    let name = world.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if !name.starts_with(PREFIX) {
        return;
    }
    for hierarchy in hierarchies_here().unwrap_or_default() {
        let group = hierarchy.own.join(name);
        // The kernel takes a moment after the end of the last process.
        let _ = until("the cgroup is removed", Duration::from_secs(1), || {
            remove_below(&group);
            Ok(if group.exists() { Err(group.display()) } else { Ok(()) })
        });
    }
}

fn remove_below(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_below(&entry.path());
        }
    }
    let _ = fs::remove_dir(group);
}
