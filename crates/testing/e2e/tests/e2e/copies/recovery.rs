//! A node that is killed with what it lent, and started again: it lends again when nobody counts on
//! that any more, and a program with copies elsewhere notices nothing.

use crate::{
    harness::{
        Outcome, TestResult,
        cluster::{
            Cluster, LONG, PATIENCE, PATIENT_WITH_DONORS, all, hecaton, log_in, ready_line, scratch,
        },
        process::{Running, kill_dead},
    },
    programs::end_verified,
};
use anyhow::Context as _;
use serde_json::Value;
use std::{
    fs::File,
    path::Path,
    process::{Command, Stdio},
};

/// A node whose donor ends with it.
fn node(name: &str, manager: &str, scratch: &Path, log: &File) -> anyhow::Result<Running> {
    let mut command = Command::new(hecaton()?);
    command.args(["node", "--name", name, "--lend", "300M", "--manager", manager]);
    command.args(["--adopt-within", "0", "--dir"]).arg(scratch.join(name));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log.try_clone()?);
    Running::spawn(&mut command)
}

fn node_of<'a>(status: &'a Value, name: &str) -> Option<&'a Value> {
    status["nodes"].as_array()?.iter().find(|node| node["name"] == name)
}

/// The borrower's pager finds out by itself that what was there is gone, makes its copies anew, and
/// says so; until then the donor is kept from lending, and afterwards it lends.
pub(crate) fn of_a_node_that_others_borrow_from() -> TestResult {
    let scratch = scratch()?;
    let log = log_in(&scratch)?;
    let mut manager = Running::spawn(
        Command::new(hecaton()?)
            .args(["manager", "--json", "--listen", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.try_clone()?),
    )?;
    let url = ready_line(&mut manager)?["manager"].as_str().context("no manager")?.to_owned();
    let dir = scratch.path().to_owned();
    let borrower = node("borrower", &url, &dir, &log)?;
    let mut lender = node("lender", &url, &dir, &log)?;
    let mut other = node("other", &url, &dir, &log)?;
    let cluster = Cluster::of(url.clone(), Vec::new(), borrower, scratch)?;
    cluster.wait_for_donors(3)?;
    let mut program = cluster.command("run");
    program.args(["--local", "16M", "--mirror", "2", "--donors", "lender,other,borrower"]);
    program.args(PATIENT_WITH_DONORS).arg("--");
    program.arg(env!("CARGO_BIN_EXE_verify-threads")).args(["1", "8000"]);
    program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log.try_clone()?);
    let mut program = Running::spawn(&mut program)?;
    let holds = |status: &Value| {
        let donors = all(status, "consumers").next().map(|one| &one["stats"]["pool"]["donors"]);
        let mut donors = donors.and_then(Value::as_array).into_iter().flatten();
        donors.any(|one| one["name"] == "lender" && one["bytes"].as_u64() > Some(0))
    };
    cluster.eventually("the lender has some of it", LONG, |status| Ok(holds(status)))?;
    // Its memory ends with it.
    cluster.until_whole()?;
    let status = cluster.status()?;
    let life = node_of(&status, "lender").context("no lender")?["member"]["life"].clone();

    kill_dead(lender.id());
    lender.wait(PATIENCE, || Ok(()))?;
    let mut lender = node("lender", &url, &dir, &log)?;
    cluster.eventually("the lender takes part again, and lends", LONG, |status| {
        let Some(node) = node_of(status, "lender") else { return Ok(false) };
        let lends = node["donors"][0]["stats"]["draining"] == false;
        let is_anew = node["member"]["life"] != life && node["member"]["phase"] == "active";
        Ok(node["state"] == "up" && node["membership"] == "active" && is_anew && lends)
    })?;
    cluster.eventually("each page has its copies", LONG, |status| {
        let pool = all(status, "consumers").next().map(|one| &one["stats"]["pool"]);
        Ok(pool.is_some_and(|pool| pool["degraded_bytes"] == 0 && pool["lost_bytes"] == 0))
    })?;

    end_verified(&cluster, &mut program)?;
    for node in [&mut lender, &mut other] {
        node.signal(rustix::process::Signal::TERM);
        node.wait(PATIENCE, || Ok(()))?;
    }
    Ok(Outcome::Passed)
}
