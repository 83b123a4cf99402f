//! `hecaton pager`: the process that pages for one consumer. Started by the node, which writes its
//! configuration to standard input as one line of JSON.

use anyhow::Context as _;
use hecaton_pager::PagerConfig;
use std::io;
use std::process::ExitCode;

pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let mut line = String::new();
    io::stdin().read_line(&mut line).context("cannot read the configuration")?;
    let config: PagerConfig = serde_json::from_str(&line).context(
        "this command is started by `hecaton node`, with a configuration on standard input",
    )?;
    hecaton_pager::run(&config)?;
    Ok(ExitCode::SUCCESS)
}
