//! Checks that limits of the caller (`ulimit`) bind the program alone.

use crate::harness::{
    Outcome, TestResult,
    cluster::{PATIENCE, hecaton, scratch},
    process::{missing, run},
};
use anyhow::{Context as _, ensure};
use std::process::Command;

/// The cluster is one of the command's own: it inherits the limits.
pub(crate) fn bind_the_program_alone() -> TestResult {
    if let Some(reason) = missing("bash") {
        return Ok(Outcome::Skipped(reason));
    }
    for (option, limit) in [("-v", "2000000"), ("-l", "16"), ("-n", "64"), ("-u", "100")] {
        // A hard limit may be raised with CAP_SYS_RESOURCE only.
        let script = format!("ulimit -S {option} {limit} && exec \"$@\"");
        let limited = |prefix: &[&str]| {
            let mut command = Command::new("bash");
            command.args(["-c", &script, "bash"]).args(prefix).args(["bash", "-c"]);
            command.arg(format!("ulimit -S {option}; ulimit -H {option}"));
            // The cluster may warn of a slow machine.
            run(command.env_remove("HECATON_MANAGER").env("HECATON_LOG", "error"), PATIENCE)
        };
        let hecaton = hecaton()?;
        let hecaton = hecaton.to_str().context("a path of letters")?;
        let native = limited(&[])?.text();
        ensure!(native.starts_with(&format!("{limit}\n")), "natively: {native:?}");
        let pooled = limited(&[hecaton, "run", "--local", "64M", "--lend", "1G", "--"])?;
        let what = format!("{option}: {:?}, {}", pooled.text(), pooled.stderr);
        ensure!(pooled.text() == native && pooled.stderr.is_empty(), "{what}");
    }
    Ok(Outcome::Passed)
}

/// Without CAP_SYS_RESOURCE.
pub(crate) fn that_cannot_be_raised_are_named() -> TestResult {
    for program in ["bash", "setpriv"] {
        if let Some(reason) = missing(program) {
            return Ok(Outcome::Skipped(reason));
        }
    }
    let scratch = scratch()?;
    let (without, limit) = ("-sys_resource", "2000000");
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", without, "--inh-caps", without, "bash", "-c"]);
    command.arg(format!("ulimit -v {limit} && exec \"$0\" \"$@\"")).arg(hecaton()?);
    command.args(["dev", "--donors", "1", "--lend", "4G", "--dir"]).arg(scratch.path().join("dev"));
    let ended = run(command.env_remove("HECATON_MANAGER"), PATIENCE)?;
    let said = "the limit of address space is 2000000 KiB; raise it with `ulimit -v`";
    ensure!(ended.status.code() == Some(1), "{}, {}", ended.status, ended.stderr);
    ensure!(ended.stderr.trim_end().ends_with(said), "{}", ended.stderr);
    ensure!(ended.stderr.lines().count() == 1, "{} is not one line", ended.stderr);
    Ok(Outcome::Passed)
}
