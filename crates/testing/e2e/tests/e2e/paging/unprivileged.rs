//! Nothing but access to userfaultfd is needed: a whole cluster, and programs that fork, as an
//! ordinary user without any capability.
//!
//! That user's `/dev/userfaultfd` is a copy of the device, which everyone may use, in a mount
//! namespace of the cluster's own: the machine's stays as it is.

use crate::{
    crash, fork,
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE, scratch},
        process::{missing, run},
    },
    redis,
};
use anyhow::{Context as _, ensure};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use std::{
    ffi::OsString,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::Path,
    process::Command,
};

/// `nobody`, by custom.
const USER: &str = "65534";

const BECOME: &str = "mount --bind \"$1\" /dev/userfaultfd && shift && exec setpriv --reuid \"$1\" \
                      --regid \"$1\" --clear-groups --bounding-set=-all --inh-caps=-all \
                      --no-new-privs -- \"${@:2}\"";

const DEVICE: &str = "/dev/userfaultfd";

pub(crate) fn programs_fork() -> TestResult {
    let scratch = scratch()?;
    let prefix = match ordinary_user(scratch.path())? {
        Ok(prefix) => prefix,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let cluster = Cluster::start_as(prefix, 2, "1G")?;
    let tests: [fn(&Cluster) -> TestResult; 4] = [
        fork::without_exec,
        fork::python_multiprocessing,
        redis::bgsave_under_load,
        crash::of_a_pager_during_forks,
    ];
    for test in tests {
        // A program that is not installed is told by the test itself.
        test(&cluster)?;
        cluster.wait_until_idle(PATIENCE)?;
    }
    Ok(Outcome::Passed)
}

/// Returns the words that, before a command, run it as [`USER`]; or the reason to skip.
fn ordinary_user(scratch: &Path) -> anyhow::Result<Result<Vec<OsString>, String>> {
    if !rustix::process::geteuid().is_root() {
        return Ok(Err("this user has no privileges; the other tests show it".into()));
    }
    for program in ["unshare", "setpriv", "mount", "bash"] {
        if let Some(reason) = missing(program) {
            return Ok(Err(reason));
        }
    }
    let Ok(device) = fs::metadata(DEVICE) else {
        return Ok(Err(format!("there is no {DEVICE}")));
    };
    let copy = scratch.join("userfaultfd");
    let number = device.rdev();
    let number = makedev(rustix::fs::major(number), rustix::fs::minor(number));
    let all = Mode::from_raw_mode(0o666);
    if let Err(error) = mknodat(CWD, &copy, FileType::CharacterDevice, all, number) {
        return Ok(Err(format!("no device can be made: {error}")));
    }
    // The mode above is subject to the umask.
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o666))?;

    let words = ["unshare", "--mount", "bash", "-c", BECOME, "bash"];
    let mut prefix: Vec<OsString> = words.map(OsString::from).to_vec();
    prefix.extend([copy.into(), USER.into()]);
    let hecaton = crate::harness::cluster::hecaton()?;
    let mut probe = Command::new(&prefix[0]);
    probe
        .args(&prefix[1..])
        .arg("sh")
        .args(["-c", "grep CapEff /proc/self/status; test -x \"$0\""]);
    let ended = run(probe.arg(hecaton), PATIENCE)?;
    if !ended.status.success() {
        let reason = ended.stderr.trim();
        return Ok(Err(format!("no command of ours can be run as another user here: {reason}")));
    }
    let said = ended.text();
    let capabilities = said.split_whitespace().last().context("it says nothing")?;
    ensure!(capabilities.chars().all(|digit| digit == '0'), "it has capabilities: {said}");
    Ok(Ok(prefix))
}
