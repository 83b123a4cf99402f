//! Gives each test processes, mounts, a network and cgroups of its own, which end with it.
//!
//! The runner starts this program once more for each test. That process (the *door*) takes new
//! namespaces and forks the *init* of the world, process 1, which forks the *test* and reaps what
//! the test's daemons leave. When init ends, the kernel kills every process of the world. Door and
//! init ask the kernel to be killed with their parents, so that a killed runner leaves no process.
//!
//! - Processes: /proc shows the world's own. No test can see or kill another one's.
//! - Mounts: private. They vanish with the last process.
//! - Network: a loopback device. No address or port of another test can be met.
//! - Cgroups: the world's own group is the root (see `cgroups`).
//! - Files: a directory, which is /tmp and `TMPDIR` from inside. It holds logs and consoles (see
//!   `logs`). Where the build lies below /tmp, the directory keeps its name.
//!
//! Swap and loop devices have no namespaces: see `leftovers`.

pub(crate) mod cgroups;
pub(crate) mod leftovers;
mod logs;
mod place;
pub(crate) mod processes;

pub(crate) use self::place::dir;
use self::{cgroups::Groups, place::DIR};
use super::{
    guest::Guests,
    runner::{Outcome, TestResult},
    wait::{until, until_every},
};
use anyhow::{Context as _, bail, ensure};
use rustix::{
    fs::{FlockOperation, flock},
    mount::{MountPropagationFlags, mount_change},
    process::{Pid, Signal, set_parent_process_death_signal},
    thread::{UnshareFlags, unshare_unsafe},
};
use std::{
    env,
    fs::{self, File},
    io::Error,
    os::unix::{
        fs::PermissionsExt as _,
        process::{ExitStatusExt as _, parent_id},
    },
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    time::Duration,
};

/// The environment variable that says to a process which test its world is of.
const TEST: &str = "HECATON_E2E_TEST";

/// Beginning of the names of directories and cgroups, by which leftovers are known.
pub(crate) const PREFIX: &str = "hecaton-e2e-";

/// The file in the directory of a world that its processes lock.
const LOCK: &str = "lock";

/// Only a hang is longer. The slowest test takes a few minutes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(900);

/// Exit status of a test that did not fail and lacks something. It said what.
const SKIPPED: u8 = 77;
const REASON: &str = "skipped";

/// How long the kernel may take to end the processes of a world.
const END_PATIENCE: Duration = Duration::from_secs(60);

const TICK: Duration = Duration::from_millis(20);

/// The test that this process is the door to.
pub(crate) fn name_of_test() -> Option<String> {
    env::var(TEST).ok()
}

/// Takes part in a world, or finds out that nobody does: locks its directory.
pub(crate) fn lock(dir: &Path, operation: FlockOperation) -> anyhow::Result<File> {
    let lock = File::options().create(true).append(true).open(dir.join(LOCK))?;
    flock(&lock, operation)?;
    Ok(lock)
}

/// Runs a test of this program in a new world.
pub(crate) fn run(name: &str, guests: Option<&Guests>) -> TestResult {
    let (dir, held) = create_dir()?;
    let groups = Groups::create(&dir)?;
    let mut door = Command::new("/proc/self/exe");
    door.env(TEST, name).env(DIR, &dir).env("TMPDIR", &dir).stdin(Stdio::null());
    groups.name_to(&mut door);
    if let Some(guests) = guests {
        guests.name_to(&mut door);
    }
    let ended = door.spawn().map_err(Into::into).and_then(wait);
    let outcome = ended.and_then(|status| outcome(&dir, status));
    if outcome.is_err() {
        logs::print_and_keep(name, &dir);
    }
    drop(held);
    // The kernel takes a moment to end the processes of a world that was killed.
    let removed = until("the world has ended", END_PATIENCE, || {
        leftovers::remove_world(&dir);
        Ok(if dir.exists() { Err("its processes hold the lock") } else { Ok(()) })
    });
    outcome.and_then(|outcome| removed.map(|()| outcome))
}

/// The directory of a new world, locked before it has a name that is looked for.
fn create_dir() -> anyhow::Result<(PathBuf, File)> {
    let new = tempfile::Builder::new().prefix("new-").disable_cleanup(true).tempdir()?;
    // A test may become another user.
    fs::set_permissions(new.path(), fs::Permissions::from_mode(0o1777))?;
    let held = lock(new.path(), FlockOperation::LockShared)?;
    let name = new.path().file_name().context("a directory has a name")?.to_string_lossy();
    let dir = new.path().with_file_name(name.replacen("new-", PREFIX, 1));
    fs::rename(new.path(), &dir)?;
    Ok((dir, held))
}

/// Waits until the world has ended, and ends it at its deadline, or when the runner has died.
fn wait(mut door: Child) -> anyhow::Result<ExitStatus> {
    let runner = parent_id();
    let ended = until_every(TICK, "the test has ended", DEADLINE, || {
        if let Some(status) = door.try_wait()? {
            return Ok(Ok(status));
        }
        ensure!(parent_id() == runner, "the runner has died");
        Ok(Err("its world is there"))
    });
    if ended.is_err() {
        door.kill()?;
        door.wait()?;
    }
    ended
}

fn outcome(dir: &Path, status: ExitStatus) -> TestResult {
    match status.code() {
        Some(0) => Ok(Outcome::Passed),
        Some(code) if code == i32::from(SKIPPED) => {
            Ok(Outcome::Skipped(fs::read_to_string(dir.join(REASON))?))
        }
        // It has said why.
        Some(_) => bail!("the test failed"),
        None => bail!("the test's world was killed: {status}"),
    }
}

/// Makes the world around this process, and runs the test in it.
pub(crate) fn enter(test: impl Fn() -> TestResult) -> ExitCode {
    match through_the_door(test) {
        Ok(status) => status,
        Err(error) => {
            eprintln!("no world for this test: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn through_the_door(test: impl Fn() -> TestResult) -> anyhow::Result<ExitCode> {
    let _lock = lock(&dir(), FlockOperation::LockShared)?;
    die_with_parent()?;
    let groups = Groups::named()?;
    groups.enter()?;
    let mut flags = UnshareFlags::NEWPID | UnshareFlags::NEWNS | UnshareFlags::NEWNET;
    flags |= UnshareFlags::NEWIPC | UnshareFlags::NEWCGROUP;
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    if !user.is_root() {
        flags |= UnshareFlags::NEWUSER;
    }
    // SAFETY: this process has one thread, and shares neither memory nor descriptors with another.
    unsafe { unshare_unsafe(flags) }.context("the kernel makes no namespaces for this user")?;
    if !user.is_root() {
        // As who it was: what the test starts has no more rights than before.
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{0} {0} 1", user.as_raw()))?;
        fs::write("/proc/self/gid_map", format!("{0} {0} 1", group.as_raw()))?;
    }
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    let init = fork(|| {
        let made = die_with_parent().and_then(|()| furnish(&groups));
        match made.and_then(|()| fork(|| conclude(&test))).and_then(reap_until_end) {
            Ok(status) => status,
            Err(error) => {
                eprintln!("no world for this test: {error:#}");
                1
            }
        }
    })?;
    let status = reap_until_end(init)?;
    Ok(ExitCode::from(status))
}

/// The process is killed when the thread that started it ends, or has ended already.
fn die_with_parent() -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// Mounts /tmp, /proc and the cgroups of a new world, and starts its loopback device. This process
/// is the first of the world.
fn furnish(groups: &Groups) -> anyhow::Result<()> {
    use rustix::mount::{MountFlags, mount, mount_bind};
    if !env::current_exe()?.starts_with("/tmp") {
        mount_bind(dir(), "/tmp").context("/tmp")?;
        for variable in [DIR, "TMPDIR"] {
            // SAFETY: this process has one thread.
            unsafe { env::set_var(variable, "/tmp") };
        }
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None).context("/proc")?;
    groups.mount()?;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status();
    let up = up.context("cannot run `ip` (Debian package iproute2)")?;
    ensure!(up.success(), "`ip link set lo up` ended with {up}");
    Ok(())
}

/// Runs the test, and says how it ended: to the reader, and by a status to the runner.
fn conclude(test: impl Fn() -> TestResult) -> u8 {
    match catch_unwind(AssertUnwindSafe(test)) {
        Ok(Ok(Outcome::Passed)) => 0,
        Ok(Ok(Outcome::Skipped(reason))) => {
            fs::write(dir().join(REASON), reason).map_or(1, |()| SKIPPED)
        }
        Ok(Err(error)) => {
            eprintln!("{error:#}");
            1
        }
        // The panic's message has been printed where it happened.
        Err(_) => 1,
    }
}

/// Forks, and has the child end with the status that `work` returns.
fn fork(work: impl FnOnce() -> u8) -> anyhow::Result<Pid> {
    // SAFETY: this process has one thread, so that no lock is held by one that the child lacks.
    match unsafe { libc::fork() } {
        -1 => Err(Error::last_os_error()).context("cannot fork"),
        0 => {
            let status = work();
            std::process::exit(status.into());
        }
        child => Pid::from_raw(child).context("fork returned no process"),
    }
}

/// Waits for every process that ends, until `child` has, and returns its status: 128 and the signal
/// for one that was killed.
fn reap_until_end(child: Pid) -> anyhow::Result<u8> {
    loop {
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        let ended = unsafe { libc::waitpid(-1, &raw mut status, 0) };
        if ended == -1 && Error::last_os_error().raw_os_error() == Some(libc::EINTR) {
            continue;
        }
        ensure!(ended > 0, "cannot wait: {}", Error::last_os_error());
        if ended == child.as_raw_nonzero().get() {
            let status = ExitStatus::from_raw(status);
            let signal = status.signal().map_or(0, |signal| signal + 128);
            return Ok(u8::try_from(status.code().unwrap_or(signal)).unwrap_or(1));
        }
    }
}
