//! Many programs on one node at once.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG},
    process::run,
};
use anyhow::{Context as _, ensure};
use std::thread;

const RUNS: usize = 24;

pub(crate) fn many_runs_at_once(cluster: &Cluster) -> TestResult {
    let ended: Vec<_> = thread::scope(|scope| {
        let runs: Vec<_> = (0..RUNS)
            .map(|_| {
                let mut command = cluster.on_pool("16M", env!("CARGO_BIN_EXE_verify-threads"));
                command.args(["2", "4000", "3000"]);
                scope.spawn(move || run(&mut command, LONG))
            })
            .collect();
        runs.into_iter().map(|run| run.join().expect("running does not panic")).collect()
    });
    for (number, ended) in ended.into_iter().enumerate() {
        let ended = ended.with_context(|| format!("run {number}"))?;
        ended.expect_success(&format!("run {number}"))?;
        ensure!(ended.text().starts_with("verified"), "run {number} said {:?}", ended.text());
    }
    Ok(Outcome::Passed)
}
