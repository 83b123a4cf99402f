//! fio as a client of a volume: it writes, and verifies what it reads.

use super::{
    cluster::{LONG, PATIENCE},
    process::{Running, missing, run, signal},
};
use anyhow::ensure;
use rustix::process::Signal;
use std::{
    fs::File,
    process::{Command, Stdio},
};

/// fio's status when it ends because it was told to.
const FIO_INTERRUPTED: i32 = 128;

/// Why fio cannot be a client here, if it cannot.
pub(crate) fn no_fio() -> anyhow::Result<Option<String>> {
    if let Some(reason) = missing("fio") {
        return Ok(Some(reason));
    }
    let engines = run(Command::new("fio").arg("--enghelp"), PATIENCE)?;
    let has_nbd = engines.text().lines().any(|line| line.trim() == "nbd");
    Ok((!has_nbd).then(|| "this fio has no nbd engine".to_owned()))
}

/// fio writing all over the first 100 MiB of a volume, and comparing what it reads back, until it
/// is told to end, or reads a wrong byte. Its errors go to `log`.
pub(crate) fn fio_verify(uri: &str, log: File) -> Command {
    let mut fio = Command::new("fio");
    fio.args(["--name=v", "--ioengine=nbd", "--rw=randwrite", "--bsrange=512-32k"])
        .args(["--iodepth=32", "--size=100M", "--verify=crc32c", "--verify_backlog=512"])
        .args(["--verify_fatal=1", "--verify_state_save=0", "--time_based", "--runtime=1h"])
        .arg(format!("--uri={uri}"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    fio
}

/// Tells fio to end, which must not have noticed anything.
pub(crate) fn end_fio(fio: &mut Running) -> anyhow::Result<()> {
    signal(fio.id(), Signal::INT);
    let ended = fio.wait(LONG, || Ok(()))?;
    ensure!(ended.code() == Some(FIO_INTERRUPTED), "fio ended with {ended}");
    Ok(())
}
