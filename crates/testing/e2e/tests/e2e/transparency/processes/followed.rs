//! Checks that a program which is started with an environment of its own is on the pool, too.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE},
    process::{missing, run},
};
use anyhow::ensure;

/// Says whether the library is in this very process.
const LOOK: &str = "/bin/grep -m 1 -o libhecaton.so /proc/self/maps";

pub(crate) fn into_environments_without_the_library(cluster: &Cluster) -> TestResult {
    let many = (0..300).map(|number| format!("A{number}=x")).collect::<Vec<_>>().join(" ");
    let ways = [
        format!("env -i {LOOK}"),
        format!("env -i {many} {LOOK}"),
        format!("env LD_PRELOAD= {LOOK}"),
        format!("env LD_PRELOAD=libdl.so.2 {LOOK}"),
        format!("env -u HECATON_PAGER -u HECATON_LARGEST_MAPPING {LOOK}"),
        format!("env -i sh -c 'unset LD_PRELOAD; {LOOK}; true'"),
    ];
    for way in ways {
        let ended = run(cluster.on_pool("64M", "sh").args(["-c", &way]), PATIENCE)?;
        let what = format!("{way}: {:?}, {}", ended.text(), ended.stderr);
        ensure!(ended.status.success() && ended.text() == "libhecaton.so\n", "{what}");
    }
    let command = ["env", "-i", env!("CARGO_BIN_EXE_wiped-memory"), "libc"];
    let stats = same_as_native(cluster, "16M", &command)?;
    ensure!(stats["pager"]["pages_out"].as_u64() > Some(1000), "too few pages left: {stats}");
    Ok(Outcome::Passed)
}

/// Each way that libc has to start a program, with an empty environment.
const SCRIPT: &str = "
import os, subprocess, sys
words = sys.argv[1].split()
def forked(start):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        start()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
forked(lambda: os.execve(words[0], words, {}))
forked(lambda: os.execve(os.open(words[0], os.O_RDONLY), words, {}))
assert os.waitpid(os.posix_spawn(words[0], words, {}), 0)[1] == 0
subprocess.run(words, env={}, check=True)
";

pub(crate) fn by_each_function_of_libc(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("python3") {
        return Ok(Outcome::Skipped(reason));
    }
    let mut command = cluster.on_pool("64M", "python3");
    let ended = run(command.args(["-c", SCRIPT, LOOK]), PATIENCE)?;
    let expected = "libhecaton.so\n".repeat(4);
    ensure!(ended.text() == expected, "{}: {:?}, {}", ended.status, ended.text(), ended.stderr);
    Ok(Outcome::Passed)
}
