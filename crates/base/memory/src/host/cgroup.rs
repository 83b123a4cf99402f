//! Memory cgroups with a limit, of either version of the kernel's interface.
//!
//! A group is a directory; its file names tell the version. One version owns the memory controller
//! of a host. The kernel refuses to lower version 1's limit below memory that it cannot reclaim. It
//! always lowers version 2's (`memory.max`), and kills processes to enforce it. So `lower` sets
//! `memory.high` first: above it, the kernel reclaims pages, slows the group, and kills none.

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Where the kernel's cgroup file systems are mounted.
const MOUNTS: &str = "/sys/fs/cgroup";

/// A group that cannot come down to a limit keeps one part in so many beyond what it has.
const ROOM: u64 = 16;

/// And this at least, in bytes.
const LEAST_ROOM_BYTES: u64 = 8 << 20;

/// Limits that this module computes are multiples of this, in bytes.
const STEP_BYTES: u64 = 2 << 20;

/// Kill rounds of one call; each kills the processes that were forked during the round before.
const KILL_ROUNDS: u32 = 8;

/// Why there is no group, or not the limit that it is to have.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The kernel has no memory cgroups, or they are mounted nowhere.
    #[error(
        "there is no memory cgroup controller under {0}; mount the cgroup file system there, or start the kernel without \
         cgroup_disable=memory"
    )]
    NoController(PathBuf),
    /// Version 2, and not for the groups in this one.
    #[error("cannot enable the {controller} controller in {path}{}", way_out(source))]
    Enable {
        /// The group that they are in.
        path: PathBuf,
        /// The controller.
        controller: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// There is one of this name, or none can be made.
    #[error("cannot make the memory cgroup {path}")]
    Make {
        /// The group.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A file of a group.
    #[error("cannot set {path} to {value}")]
    Set {
        /// The file.
        path: PathBuf,
        /// Value that could not be written.
        value: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// A file of a group.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system call, or `InvalidData` if the file has no number.
        source: io::Error,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl Version {
    const fn limit(self) -> &'static str {
        match self {
            Version::V1 => "memory.limit_in_bytes",
            Version::V2 => "memory.max",
        }
    }

    const fn charged(self) -> &'static str {
        match self {
            Version::V1 => "memory.usage_in_bytes",
            Version::V2 => "memory.current",
        }
    }

    /// Fields of `memory.stat` for anonymous and shared memory of the group and groups below.
    const fn in_use(self) -> [&'static str; 2] {
        match self {
            Version::V1 => ["total_rss", "total_shmem"],
            Version::V2 => ["anon", "shmem"],
        }
    }
}

/// Where memory cgroups are made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hierarchy {
    root: PathBuf,
    version: Version,
}

impl Hierarchy {
    /// This host's: version 2's memory controller where there is one, else version 1's.
    pub fn find() -> Result<Hierarchy, CgroupError> {
        Hierarchy::find_in(Path::new(MOUNTS))
    }

    fn find_in(mounts: &Path) -> Result<Hierarchy, CgroupError> {
        // On a host with both versions, version 2 has the controllers that version 1 leaves.
        for root in [mounts.to_owned(), mounts.join("unified")] {
            if lists(&root.join("cgroup.controllers"), "memory") {
                return Ok(Hierarchy { root, version: Version::V2 });
            }
        }
        let root = mounts.join("memory");
        match root.join(Version::V1.limit()).exists() {
            true => Ok(Hierarchy { root, version: Version::V1 }),
            false => Err(CgroupError::NoController(mounts.to_owned())),
        }
    }

    /// The group that all others are in.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The directory of the group of this name, whether it is there or not.
    pub fn path_of(&self, name: impl AsRef<Path>) -> PathBuf {
        self.root.join(name)
    }

    /// Makes a group with a limit in bytes and none on swap. Missing parent groups, if the name has
    /// several parts, are made without a limit, and stay.
    pub fn make(&self, name: impl AsRef<Path>, limit_bytes: u64) -> Result<Group, CgroupError> {
        let path = self.path_of(name);
        let within = path.ancestors().skip(1).take_while(|group| group.starts_with(&self.root));
        let within: Vec<&Path> = within.collect();
        for group in within.into_iter().rev() {
            match fs::create_dir(group) {
                Err(source) if !group.is_dir() => {
                    return Err(CgroupError::Make { path: group.to_owned(), source });
                }
                _ => {}
            }
            if self.version == Version::V2 {
                enable(group, "memory")?;
            }
        }
        fs::create_dir(&path).map_err(|source| CgroupError::Make { path: path.clone(), source })?;
        let group = Group { path, version: self.version };
        match group.limit(limit_bytes) {
            Ok(()) => Ok(group),
            Err(error) => {
                let _ = group.remove();
                Err(error)
            }
        }
    }
}

/// Enables a controller of version 2 for the groups below `group`. Refuses a group with processes,
/// except the root of all, as the kernel does for the memory controller. The kernel would enable
/// the cpu controller there, but admit no more processes to the groups below.
pub fn enable(group: &Path, controller: &'static str) -> Result<(), CgroupError> {
    let file = group.join("cgroup.subtree_control");
    if lists(&file, controller) {
        return Ok(());
    }
    let enabled = match has_processes_beside_groups(group) {
        true => Err(Errno::BUSY.into()),
        false => write(&file, &format!("+{controller}")),
    };
    enabled.map_err(|source| CgroupError::Enable { path: group.to_owned(), controller, source })
}

/// `false` for the root of all, which alone has no type; the root of a cgroup namespace has one.
fn has_processes_beside_groups(group: &Path) -> bool {
    let procs = || fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    group.join("cgroup.type").exists() && !procs().trim().is_empty()
}

fn way_out(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::BUSY) => {
            "; it has processes of its own, as the root of a container's cgroup namespace has, and version 2 divides nothing \
             between processes and groups beside them: move them into a group below it, or run Hecaton outside of the container"
        }
        _ => "",
    }
}

fn lists(file: &Path, controller: &str) -> bool {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.split_whitespace().any(|name| name == controller)
}

/// Memory charged to a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charged {
    /// All memory that counts against the limit.
    pub all_bytes: u64,
    /// Anonymous and shared memory, which the kernel cannot reclaim without swap.
    pub in_use_bytes: u64,
}

/// A group. It stays when this is dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    path: PathBuf,
    version: Version,
}

impl Group {
    /// The group that has this directory; none if there is none.
    pub fn at(path: &Path) -> Option<Group> {
        let version = [Version::V2, Version::V1]
            .into_iter()
            .find(|version| path.join(version.limit()).exists())?;
        Some(Group { path: path.to_owned(), version })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Limit in bytes. A group without a limit reports more than any host has.
    pub fn limit_bytes(&self) -> Result<u64, CgroupError> {
        let text = self.read(self.version.limit())?;
        match text.trim() {
            "max" => Ok(u64::MAX),
            number => self.number(self.version.limit(), number),
        }
    }

    /// Memory charged to the group.
    pub fn charged(&self) -> Result<Charged, CgroupError> {
        let stat = self.read("memory.stat")?;
        let value = |name: &str| {
            let mut values = stat.lines().filter_map(|line| line.split_once(' '));
            values.find(|(known, _)| *known == name).and_then(|(_, value)| value.parse().ok())
        };
        let in_use: [Option<u64>; 2] = self.version.in_use().map(value);
        Ok(Charged {
            all_bytes: self.charged_bytes()?,
            in_use_bytes: in_use.into_iter().flatten().sum(),
        })
    }

    fn charged_bytes(&self) -> Result<u64, CgroupError> {
        let text = self.read(self.version.charged())?;
        self.number(self.version.charged(), text.trim())
    }

    /// Limits it to no less than it has: nothing is taken back.
    pub fn raise(&self, bytes: u64) -> Result<(), CgroupError> {
        self.limit(bytes)?;
        match self.version {
            Version::V1 => Ok(()),
            Version::V2 => self.set("memory.high", bytes),
        }
    }

    /// Lowers the limit to `bytes`, or as near as reclaim gets, and returns the new limit. Kills no
    /// process. A group that stays above `bytes` keeps some room. Waits for the kernel's reclaim.
    pub fn lower(&self, bytes: u64) -> Result<u64, CgroupError> {
        let in_force = self.limit_bytes()?;
        match self.version {
            Version::V1 => match self.limit(bytes) {
                Ok(()) => return Ok(bytes),
                Err(error) if is_busy(&error) => {}
                Err(error) => return Err(error),
            },
            Version::V2 => self.set("memory.high", bytes)?,
        }
        let limit = nearest(bytes, in_force, self.charged_bytes()?);
        if limit == in_force {
            return Ok(in_force);
        }
        match self.limit(limit) {
            Ok(()) => Ok(limit),
            // It has taken more in the meantime.
            Err(error) if is_busy(&error) => Ok(in_force),
            Err(error) => Err(error),
        }
    }

    fn limit(&self, bytes: u64) -> Result<(), CgroupError> {
        self.set(self.version.limit(), bytes)
    }

    /// Moves a process with all threads in. Memory charged before stays with the old group.
    pub fn enter(&self, pid: u32) -> Result<(), CgroupError> {
        self.set("cgroup.procs", pid)
    }

    /// Its processes, and those of groups below it; none if it is gone.
    pub fn members(&self) -> Result<Vec<u32>, CgroupError> {
        let text = match self.read("cgroup.procs") {
            Err(CgroupError::Read { source, .. }) if is_gone(&source) => return Ok(Vec::new()),
            text => text?,
        };
        let mut members = numbers(&text);
        for below in below(&self.path) {
            // One that ends meanwhile has none.
            let text = fs::read_to_string(below.join("cgroup.procs"));
            members.extend(numbers(&text.unwrap_or_default()));
        }
        Ok(members)
    }

    /// Sends a signal to all of them.
    pub fn signal(&self, signal: Signal) -> Result<(), CgroupError> {
        let open = |pid: u32| {
            let process = i32::try_from(pid).ok().and_then(Pid::from_raw)?;
            Some((pid, pidfd_open(process, PidfdFlags::empty()).ok()?))
        };
        let found: Vec<(u32, OwnedFd)> = self.members()?.into_iter().filter_map(open).collect();
        // A PID may be reused before it is opened: signal only PIDs that are still members.
        let members = self.members()?;
        for (pid, process) in found {
            if members.contains(&pid) {
                // One that has ended needs no signal.
                let _ = pidfd_send_signal(process, signal);
            }
        }
        Ok(())
    }

    /// Kills all of them. They may take a moment to be gone.
    pub fn kill(&self) -> Result<(), CgroupError> {
        let file = "cgroup.kill";
        // Version 2 has this file since Linux 5.14.
        if self.path.join(file).exists() {
            return self.set(file, 1);
        }
        for _ in 0..KILL_ROUNDS {
            if self.members()?.is_empty() {
                break;
            }
            self.signal(Signal::KILL)?;
        }
        Ok(())
    }

    /// Removes the group and empty groups below it. A group with processes stays: an error. The
    /// file pages of a removed group are charged to its parent.
    pub fn remove(&self) -> io::Result<()> {
        let mut groups = below(&self.path);
        groups.insert(0, self.path.clone());
        // Those below come after the ones that they are below of.
        for group in groups.iter().rev() {
            match fs::remove_dir(group) {
                Err(error) if !is_gone(&error) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn set(&self, file: &str, value: impl ToString) -> Result<(), CgroupError> {
        let (path, value) = (self.path.join(file), value.to_string());
        write(&path, &value).map_err(|source| CgroupError::Set { path, value, source })
    }

    fn read(&self, file: &str) -> Result<String, CgroupError> {
        let path = self.path.join(file);
        fs::read_to_string(&path).map_err(|source| CgroupError::Read { path, source })
    }

    fn number(&self, file: &str, text: &str) -> Result<u64, CgroupError> {
        text.parse().map_err(|_| CgroupError::Read {
            path: self.path.join(file),
            source: io::Error::new(ErrorKind::InvalidData, format!("`{text}` is no number")),
        })
    }
}

/// Limit for a group whose limit is `in_force_bytes` and should be `bytes`, and that has
/// `charged_bytes` left after reclaim. Above `bytes` it leaves room: the next page must fit.
fn nearest(bytes: u64, in_force_bytes: u64, charged_bytes: u64) -> u64 {
    if charged_bytes <= bytes {
        return bytes;
    }
    let room = (charged_bytes / ROOM).max(LEAST_ROOM_BYTES);
    let limit = charged_bytes.saturating_add(room).checked_next_multiple_of(STEP_BYTES);
    limit.map_or(in_force_bytes, |limit| limit.min(in_force_bytes))
}

/// All groups below one, each after the one that it is in.
fn below(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut next = Some(path.to_owned());
    let mut at = 0;
    while let Some(dir) = next {
        for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                found.push(entry.path());
            }
        }
        next = found.get(at).cloned();
        at += 1;
    }
    found
}

fn numbers(text: &str) -> Vec<u32> {
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// Writes a file that is there; elsewhere than in a cgroup file system it would be made.
fn write(path: &Path, value: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).truncate(true).open(path)?;
    file.write_all(value.as_bytes())
}

/// The group is gone, also one whose files are still open.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(Errno::NODEV.raw_os_error())
}

fn is_busy(error: &CgroupError) -> bool {
    let CgroupError::Set { source, .. } = error else { return false };
    source.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    const M: u64 = 1 << 20;

    /// A directory with the files of a group of version 2.
    fn group_of_version_2(dir: &Path) -> Group {
        for (file, text) in [
            ("memory.max", "max\n"),
            ("memory.high", "max\n"),
            ("memory.current", "0\n"),
            ("memory.stat", "anon 0\nfile 0\nshmem 0\n"),
            ("cgroup.procs", ""),
        ] {
            fs::write(dir.join(file), text).unwrap();
        }
        Group::at(dir).expect("a group")
    }

    fn text(group: &Group, file: &str) -> String {
        fs::read_to_string(group.path.join(file)).unwrap()
    }

    fn sleeper() -> Child {
        Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().expect("started")
    }

    #[test]
    fn the_memory_controller_is_found_wherever_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let error = Hierarchy::find_in(dir.path()).expect_err("nothing there").to_string();
        assert!(error.contains("no memory cgroup controller"), "{error}");
        let v1 = dir.path().join("memory");
        fs::create_dir(&v1).unwrap();
        fs::write(v1.join("memory.limit_in_bytes"), "1\n").unwrap();
        fs::create_dir(dir.path().join("unified")).unwrap();
        fs::write(dir.path().join("unified/cgroup.controllers"), "cpu io\n").unwrap();
        let found = Hierarchy::find_in(dir.path()).expect("version 1");
        assert_eq!(found, Hierarchy { root: v1, version: Version::V1 });
        fs::write(dir.path().join("cgroup.controllers"), "cpu memory\n").unwrap();
        let found = Hierarchy::find_in(dir.path()).expect("version 2");
        assert_eq!(found, Hierarchy { root: dir.path().to_owned(), version: Version::V2 });
    }

    #[test]
    fn a_new_group_of_version_2_has_its_controller() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { root: dir.path().to_owned(), version: Version::V2 };
        let error = hierarchy.make("a", M).expect_err("no cgroup file system").to_string();
        assert!(error.contains("cannot enable the memory controller"), "{error}");
        fs::write(dir.path().join("cgroup.subtree_control"), "\n").unwrap();
        // The kernel would have filled it with files.
        let error = hierarchy.make("a", M).expect_err("no limit").to_string();
        assert!(error.contains("memory.max to 1048576"), "{error}");
        assert!(!dir.path().join("a").exists(), "half of it is left");
        let control = fs::read_to_string(dir.path().join("cgroup.subtree_control")).unwrap();
        assert_eq!(control, "+memory");
        fs::create_dir(dir.path().join("a")).unwrap();
        let error = hierarchy.make("a", M).expect_err("somebody else's").to_string();
        assert!(error.contains("cannot make the memory cgroup"), "{error}");
    }

    #[test]
    fn a_new_group_below_others_of_version_2_has_its_controller() {
        let dir = tempfile::tempdir().unwrap();
        let hierarchy = Hierarchy { root: dir.path().join("root"), version: Version::V2 };
        let controls = ["root", "root/a"].map(|group| dir.path().join(group));
        for group in &controls {
            fs::create_dir(group).unwrap();
            fs::write(group.join("cgroup.subtree_control"), "cpu\n").unwrap();
        }
        let error = hierarchy.make("a/b", M).expect_err("no limit").to_string();
        assert!(error.contains("root/a/b/memory.max"), "{error}");
        for group in &controls {
            let control = fs::read_to_string(group.join("cgroup.subtree_control")).unwrap();
            assert_eq!(control, "+memory", "{}", group.display());
        }
        let left: Vec<_> = fs::read_dir(&controls[1]).unwrap().collect();
        assert_eq!(left.len(), 1, "half of it is left");
        // `make` also makes the missing parent.
        let error = hierarchy.make("c/d", M).expect_err("no cgroup file system").to_string();
        assert!(error.contains("cannot enable the memory controller in"), "{error}");
        assert!(dir.path().join("root/c").is_dir());
    }

    #[test]
    fn a_group_with_processes_of_its_own_divides_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let control = dir.path().join("cgroup.subtree_control");
        fs::write(&control, "\n").unwrap();
        fs::write(dir.path().join("cgroup.procs"), "7\n").unwrap();
        fs::write(dir.path().join("cgroup.type"), "domain\n").unwrap();
        let error = enable(dir.path(), "cpu").expect_err("it has a process");
        assert!(error.to_string().contains("cannot enable the cpu controller in"), "{error}");
        assert!(error.to_string().contains("it has processes of its own"), "{error}");
        assert_eq!(fs::read_to_string(&control).unwrap(), "\n", "it is left as it was");
        // The root of all has any.
        fs::remove_file(dir.path().join("cgroup.type")).unwrap();
        enable(dir.path(), "cpu").unwrap();
        assert_eq!(fs::read_to_string(&control).unwrap(), "+cpu");
        fs::write(dir.path().join("cgroup.type"), "domain\n").unwrap();
        fs::write(&control, "memory cpu\n").unwrap();
        enable(dir.path(), "cpu").expect("it is enabled already");
    }

    #[test]
    fn a_limit_is_lowered_as_far_as_the_group_comes_down() {
        assert_eq!(nearest(64 * M, 256 * M, 64 * M), 64 * M);
        assert_eq!(nearest(64 * M, 256 * M, 100 * M), 108 * M, "some room");
        assert_eq!(nearest(64 * M, 2048 * M, 1600 * M), 1700 * M);
        assert_eq!(nearest(64 * M, 256 * M, 254 * M), 256 * M, "no more than it had");
        assert_eq!(nearest(64 * M, u64::MAX, u64::MAX - 1), u64::MAX);
    }

    #[test]
    fn a_group_of_version_2_is_slowed_down_before_it_is_limited() {
        let dir = tempfile::tempdir().unwrap();
        let group = group_of_version_2(dir.path());
        assert_eq!(group.limit_bytes().unwrap(), u64::MAX);
        group.raise(256 * M).unwrap();
        let limits = || ["memory.max", "memory.high"].map(|file| text(&group, file));
        assert_eq!(limits(), ["268435456", "268435456"]);
        let has = |bytes: u64| fs::write(dir.path().join("memory.current"), format!("{bytes}\n"));
        has(100 * M).unwrap();
        assert_eq!(group.lower(64 * M).unwrap(), 108 * M);
        assert_eq!(limits(), ["113246208", "67108864"]);
        // It takes more, which its limit allows.
        has(107 * M).unwrap();
        assert_eq!(group.lower(64 * M).unwrap(), 108 * M);
        has(60 * M).unwrap();
        assert_eq!(group.lower(64 * M).unwrap(), 64 * M);
        assert_eq!(limits(), ["67108864", "67108864"]);
    }

    #[test]
    fn what_can_be_taken_back_is_not_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let group = group_of_version_2(dir.path());
        fs::write(dir.path().join("memory.current"), "1000\n").unwrap();
        let stat = "anon 300\nfile 600\nkernel 100\nshmem 50\nanon_thp 7\n";
        fs::write(dir.path().join("memory.stat"), stat).unwrap();
        assert_eq!(group.charged().unwrap(), Charged { all_bytes: 1000, in_use_bytes: 350 });
        let v1 = tempfile::tempdir().unwrap();
        for (file, text) in [
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory.usage_in_bytes", "2000\n"),
            ("memory.stat", "rss 1\nshmem 1\ntotal_rss 700\ntotal_rss_huge 8\ntotal_shmem 20\n"),
        ] {
            fs::write(v1.path().join(file), text).unwrap();
        }
        let group = Group::at(v1.path()).expect("a group");
        assert_eq!(group.charged().unwrap(), Charged { all_bytes: 2000, in_use_bytes: 720 });
        assert!(group.limit_bytes().unwrap() > 1 << 60);
        fs::write(v1.path().join("memory.usage_in_bytes"), "much\n").unwrap();
        let error = group.charged().expect_err("no number").to_string();
        assert!(error.contains("memory.usage_in_bytes"), "{error}");
    }

    #[test]
    fn members_of_groups_below_count_and_nobody_else_is_signalled() {
        let dir = tempfile::tempdir().unwrap();
        let group = group_of_version_2(dir.path());
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        let (mut inside, mut outside) = (sleeper(), sleeper());
        fs::write(dir.path().join("cgroup.procs"), "0\n").unwrap();
        fs::write(dir.path().join("a/b/cgroup.procs"), format!("{}\n", inside.id())).unwrap();
        assert_eq!(group.members().unwrap(), [0, inside.id()]);
        group.signal(Signal::TERM).unwrap();
        assert!(!inside.wait().unwrap().success());
        assert_eq!(outside.try_wait().unwrap(), None);
        outside.kill().unwrap();
        outside.wait().unwrap();
        fs::remove_file(dir.path().join("a/b/cgroup.procs")).unwrap();
        let error = group.remove().expect_err("no cgroup file system: it has files");
        assert_eq!(error.kind(), ErrorKind::DirectoryNotEmpty);
        assert!(!dir.path().join("a").exists());
        let gone = Group { path: dir.path().join("gone"), version: Version::V2 };
        gone.remove().expect("it is gone already");
        assert_eq!(gone.members().unwrap(), [0; 0]);
    }

    /// A group below the root of a real file system; none if this user may make none there.
    fn real(root: &Path, test: &str) -> Option<PathBuf> {
        let path = root.join(format!("hecaton-test-{test}-{}", std::process::id()));
        match fs::create_dir(&path) {
            Ok(()) => Some(path),
            Err(error) => {
                println!("skipped: {test}: cannot make {}: {error}", path.display());
                None
            }
        }
    }

    /// The kernel's own, where there is a version 2, with or without a memory controller.
    #[test]
    fn a_real_group_of_version_2_is_killed_and_removed() {
        let mounts = Path::new(MOUNTS);
        let roots = [mounts.to_owned(), mounts.join("unified")];
        let Some(root) = roots.into_iter().find(|root| root.join("cgroup.controllers").exists())
        else {
            return println!("skipped: a_real_group_of_version_2: there is no version 2 here");
        };
        let Some(path) = real(&root, "killed") else { return };
        kills_and_removes(&Group { path, version: Version::V2 });
    }

    fn kills_and_removes(group: &Group) {
        fs::create_dir(group.path.join("below")).unwrap();
        let below = Group { path: group.path.join("below"), version: group.version };
        let (mut one, mut other) = (sleeper(), sleeper());
        group.enter(one.id()).unwrap();
        below.enter(other.id()).unwrap();
        assert_eq!(group.members().unwrap(), [one.id(), other.id()]);
        assert!(group.remove().is_err(), "it has processes");
        group.kill().unwrap();
        for child in [&mut one, &mut other] {
            assert!(!child.wait().unwrap().success());
        }
        assert_eq!(group.members().unwrap(), [0; 0]);
        group.remove().expect("it is empty");
        assert!(!group.path.exists());
    }

    /// The kernel's own, of this host.
    #[test]
    fn a_real_group_is_limited_and_gives_what_can_be_taken() {
        let hierarchy = match Hierarchy::find() {
            Ok(hierarchy) => hierarchy,
            Err(error) => return println!("skipped: a_real_group: {error}"),
        };
        let name = format!("hecaton-test-limit-{}", std::process::id());
        let group = match hierarchy.make(&name, 256 * M) {
            Ok(group) => group,
            Err(error) => return println!("skipped: a_real_group: {error}"),
        };
        assert_eq!(Group::at(group.path()).as_ref(), Some(&group));
        assert_eq!(group.limit_bytes().unwrap(), 256 * M);
        let again = hierarchy.make(&name, M).expect_err("it is there").to_string();
        assert!(again.contains(&name), "{again}");
        // 64 MiB of its own, and says so.
        let mut child = Command::new("perl");
        let script =
            "sleep 1 while !-e $ARGV[0]; my $x = 'x' x $ARGV[1]; print \"full\\n\"; sleep 600";
        let dir = tempfile::tempdir().unwrap();
        let go = dir.path().join("go");
        child.args(["-e", &format!("$| = 1; {script}")]).arg(&go);
        child.arg((64 * M).to_string()).stdout(Stdio::piped());
        let mut child = child.spawn().expect("perl is there");
        group.enter(child.id()).unwrap();
        fs::write(&go, "").unwrap();
        let mut line = String::new();
        let output = child.stdout.take().expect("a pipe");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line).unwrap();
        assert_eq!(line, "full\n");
        let charged = group.charged().unwrap();
        assert!(charged.in_use_bytes >= 64 * M, "{charged:?}");
        assert!(charged.in_use_bytes <= charged.all_bytes, "{charged:?}");
        assert!(charged.all_bytes <= 256 * M, "{charged:?}");
        let has_swap = fs::read_to_string("/proc/swaps").unwrap().lines().count() > 1;
        if has_swap {
            println!("skipped: a_real_group: what it cannot give is swapped here");
        } else {
            let limit = group.lower(16 * M).unwrap();
            assert!((64 * M..256 * M).contains(&limit), "{limit}");
            assert_eq!(group.limit_bytes().unwrap(), limit);
            assert_eq!(child.try_wait().unwrap(), None, "it was killed for it");
        }
        group.raise(192 * M).unwrap();
        assert_eq!(group.limit_bytes().unwrap(), 192 * M);
        group.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(group.members().unwrap(), [0; 0]);
        assert_eq!(group.lower(16 * M).unwrap(), 16 * M, "what it has is not in use");
        group.remove().unwrap();
    }

    #[test]
    fn a_real_group_of_this_host_is_killed_and_removed() {
        let Ok(hierarchy) = Hierarchy::find() else {
            return println!("skipped: a_real_group_of_this_host: no memory controller");
        };
        let name = format!("hecaton-test-tree-{}", std::process::id());
        match hierarchy.make(&name, 256 * M) {
            Ok(group) => kills_and_removes(&group),
            Err(error) => println!("skipped: a_real_group_of_this_host: {error}"),
        }
    }
}
