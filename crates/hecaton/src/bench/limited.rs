//! `bench limited`: one command under a memory limit and on a swap device, the way `bench app` runs
//! its programs, for comparing a program of one's own.

use super::Place;
use super::app::{Kind, Setup};
use crate::bench::world::process::{Guarded, describe};
use anyhow::{Context as _, ensure};
use hecaton_memory::Size;
use serde::Serialize;
use std::{
    ffi::OsString,
    time::{Duration, Instant},
};

/// Arguments of `bench limited`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Memory that may be local, everything that the command's memory cgroup accounts.
    #[arg(long)]
    local: Size,
    /// Size of the swap device.
    #[arg(long)]
    swap: Size,
    /// The kind of swap device.
    #[arg(long, value_enum, default_value_t = Kind::Disk)]
    method: Kind,
    /// Seconds after which the command is ended.
    #[arg(long, default_value_t = 3600)]
    limit_s: u64,
    /// Prints one JSON object instead of a line.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    place: Place,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Serialize)]
struct Result {
    method: &'static str,
    local_bytes: u64,
    elapsed_s: f64,
    device_local_bytes: Option<u64>,
}

/// The result goes to the standard error: the standard output is the command's.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let scratch = args.place.scratch()?;
    let setup = Setup::limited(args.method, args.local.0, args.swap.0, scratch.path())?;
    let (program, arguments) = args.command.split_first().context("a command is required")?;
    let mut command = setup.command(program);
    command.args(arguments);
    let start = Instant::now();
    let mut guarded = Guarded::spawn(&mut command)?;
    let status = guarded.wait_until(start + Duration::from_secs(args.limit_s))?;
    let elapsed_s = start.elapsed().as_secs_f64();
    let program = program.display();
    let status =
        status.with_context(|| format!("`{program}` has not ended after {} s", args.limit_s))?;
    ensure!(status.success(), "`{program}` {} on {}", describe(status), args.method.name());
    let result = Result {
        method: args.method.name(),
        local_bytes: args.local.0,
        elapsed_s,
        device_local_bytes: setup.own_local_bytes(),
    };
    if args.json {
        eprintln!("{}", serde_json::to_string(&result)?);
    } else {
        eprintln!("bench: {elapsed_s:.2} s with {} local on {}", args.local, result.method);
    }
    Ok(())
}
