//! The agent on a host of two NUMA nodes, which test machines rarely have. In some tests a guest is
//! the host: its machines are real QEMUs that hold memory of both nodes and run nothing, for in an
//! emulated guest another one takes minutes to boot. In the others this machine is the host, and
//! its agent is shown two nodes: real guests give memory back there, and what is bound is all on
//! the one node that there is.

use crate::{
    agent::{Host, adds_up, sleeping_qemu},
    harness::{
        Outcome, TestResult,
        cluster::Cluster,
        guest::{GUEST_PATIENCE, Guests, Machine, Qemu, Spec},
        process::Running,
        wait::until,
    },
    memory_files::held,
};
use anyhow::{Context as _, ensure};
use serde_json::Value;
use std::{
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

const M: u64 = 1 << 20;

/// A host of two nodes of 768 MiB.
const TWO_NODES: &[&str] = &[
    "-no-reboot",
    "-smp",
    "2",
    "-m",
    "1536M",
    "-object",
    "memory-backend-memfd,id=node0,size=768M,share=on",
    "-object",
    "memory-backend-memfd,id=node1,size=768M,share=on",
    "-numa",
    "node,nodeid=0,memdev=node0,cpus=0",
    "-numa",
    "node,nodeid=1,memdev=node1,cpus=1",
];

/// Beginning of the scripts below: defines their shell functions, and starts a manager.
const HOST: &str = r#"
export HECATON_LOG=error
die() { echo "guest: at $*"; cat /tmp/log; exit 1; }
until_true() { i=0; until "$@" >/dev/null 2>&1; do i=$((i+1)); [ $i -lt 200 ] || die "$@"; sleep 1; done; }
status() { hecaton host status --json --dir /tmp/n; }
is() { status | grep -q "$1"; }
isnt() { ! is "$1"; }
shmem() { awk '/Shmem:/ { print $4 * 1024 }' /sys/devices/system/node/node$1/meminfo; }
start() {
  hecaton node --name host --manager http://127.0.0.1:7070 --dir /tmp/n --agent --qmp-dir /tmp/vms "$@" >>/tmp/log 2>&1 &
  node=$!
  until_true status
}
# Only when it has ended is all closed that it held open, its lock and its children's streams included.
kill_node() { kill -9 $node; wait $node; }
create() {
  name=$1; kind=$2; state=$3; shift 3
  hecaton vm create --$kind --name $name --dir /tmp/n "$@" >>/tmp/log 2>&1 &
  until_true is "\"name\":\"$name\",\"kind\":\"$kind\",\"state\":\"$state\""
  echo "guest: $name $(status)"
}
refused() {
  words=$1; shift
  hecaton vm create --dir /tmp/n "$@" 2>&1 | grep -q "$words" || die refused "$words"
}
pid() { status | sed "s/.*\"name\":\"$1\"[^}]*\"pid\":\([0-9]*\).*/\1/"; }
# fd PID N: the number of its N-th memory file.
fd() { ls -l /proc/$1/fd | sed -n 's/.* \([0-9]*\) -> .*memory-backend.*/\1/p' | sort -n | sed -n $2p; }
fill() { dd if=/dev/zero of=/proc/$1/fd/$(fd $1 $2) bs=1M count=$3 conv=notrunc 2>/dev/null || die fill; }
qemu="qemu-system-x86_64 -accel tcg -nodefaults -display none"
hecaton manager --listen 127.0.0.1:7070 >/tmp/log 2>&1 &
"#;

/// Machines come, one after the other; after each the host is shown. The one that can grow has no
/// program, and waits.
const MACHINES: &str = r#"
start --manage 512M --buffer 64M --numa-balance
echo "guest: empty $(status)"

dd if=/dev/zero of=/tmp/bios bs=64k count=1 2>/dev/null
create grows harvest running --min 64M --max 256M -- $qemu -M q35 -bios /tmp/bios -S
before0=$(shmem 0) before1=$(shmem 1)
pid=$(pid grows)
fill $pid 3 48
until_true is '"base_bytes":0,"requested_bytes":[1-9][0-9]*,"harvested_bytes":0,"held_bytes":50331648'
echo "guest: grown $(status)"
binds=$(grep memory-backend /proc/$pid/numa_maps | grep -o 'bind:[01]' | sort)
echo "guest: placed $(($(shmem 0) - before0)) $(($(shmem 1) - before1))" $binds
kill $pid
until_true isnt '"name":"grows"'
create named harvest running --min 64M --max 128M --numa 1 -- $qemu -M q35 -bios /tmp/bios -S
kill $(pid named)
until_true isnt '"name":"named"'

create bound regular running --memory 64M --numa 1 -- $qemu -M none
before=$(shmem 1)
pid=$(pid bound)
fill $pid 1 48
echo "guest: filled $(($(shmem 1) - before)) $(grep memory-backend /proc/$pid/numa_maps)"
refused "another node of this host has" --regular --memory 220M --numa 1 -- $qemu -M none
create within regular running --memory 128M -- $qemu -M none
refused "choose another host" --regular --memory 300M --numa 0 -- $qemu -M none
refused "the host has no NUMA node 7; it has 0, 1" --regular --memory 16M --numa 7 -- $qemu -M none
refused "name one with --numa" --harvest --balloon --min 16M --max 32M -- $qemu -M none
create spans regular starting --memory 300M -- idle
hecaton host status --dir /tmp/n | grep -q "spread over NUMA nodes: 1" || die spread
"#;

/// The guest that is the host, with these programs and scripts. Its kernel line has no room for
/// them. `program`: what the script starts besides; QEMU without it.
pub(crate) fn host(
    cluster: &Cluster,
    guests: &Guests,
    name: &str,
    script: &str,
    program: Option<&Path>,
) -> anyhow::Result<Machine> {
    let qemu = PathBuf::from(&guests.command_line(Qemu::Backports, "")[0]);
    let script = format!("{HOST}{script}");
    let files = [("bin/idle", "#!/bin/sh\nexec sleep 3600\n"), ("bin/numa-host", &script)];
    let guests = guests.with(cluster.dir(name)?, &cluster.hecaton, &files)?;
    let dir = cluster.dir(&format!("{name}-program"))?;
    let guests = guests.with(dir, program.unwrap_or(&qemu), &[("tmp/.is", "")])?;
    let spec = Spec { name, script: "sh /bin/numa-host", arguments: TWO_NODES, ..Spec::default() };
    Machine::start_with_its_memory(cluster, &guests, &spec)
}

/// A machine's memory is on the node that is named, or within one wherever that can be; one for
/// which no node is large enough spans them, and is counted. Each node keeps its part of the
/// buffer.
pub(crate) fn machines_stay_within_a_node(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut host = host(cluster, guests, "numa-host", MACHINES, None)?;

    let empty = status(&mut host, "empty")?;
    ensure!(of_nodes(&empty, "buffer_bytes")? == [32 * M, 32 * M], "the buffer is uneven: {empty}");
    // One that can grow has memory of both nodes, each part really there.
    let grown = status(&mut host, "grown")?;
    let minimum = of_nodes(&grown, "minimum_bytes")?;
    let home = minimum.iter().position(|bytes| *bytes == 64 * M);
    let home = home.with_context(|| format!("its minimum is spread: {grown}"))?;
    let harvested = of_nodes(&grown, "harvested_bytes")?;
    ensure!(harvested.iter().all(|bytes| *bytes >= 48 * M), "it was not asked to grow: {grown}");
    let placed = host.wait_for("guest: placed")?;
    let words: Vec<&str> = placed.split(' ').collect();
    let mut binds = [home, home, 1 - home].map(|node| format!("bind:{node}"));
    binds.sort();
    ensure!(words[4..] == binds, "it is bound otherwise: {placed}");
    let there: u64 = words[3 - home].parse()?;
    ensure!(there > 44 * M, "what it has of the other node is elsewhere: {placed}");
    // Unless it was to be on one.
    let named = status(&mut host, "named")?;
    ensure!(of_nodes(&named, "minimum_bytes")? == [0, 64 * M], "it is elsewhere: {named}");
    ensure!(named["machines"][0]["nodes"].as_array().map(Vec::len) == Some(1), "{named}");
    let bound = status(&mut host, "bound")?;
    ensure!(of_nodes(&bound, "regular_bytes")? == [0, 64 * M], "it is on another node: {bound}");
    // Its memory really is there, whoever writes it.
    let filled = host.wait_for("guest: filled")?;
    let bytes: u64 = filled.split(' ').nth(2).context("no figure")?.parse()?;
    // The script filled 48 MiB; other processes take and free a little meanwhile.
    ensure!(bytes > 44 * M && filled.contains(" bind:1 "), "it is bound otherwise: {filled}");
    let within = status(&mut host, "within")?;
    let regular = of_nodes(&within, "regular_bytes")?;
    ensure!(
        regular == [128 * M, 64 * M] || regular == [0, 192 * M],
        "it is on several nodes: {within}"
    );
    ensure!(within["counters"]["spanning"] == 0, "{within}");
    let spans = status(&mut host, "spans")?;
    let regular = of_nodes(&spans, "regular_bytes")?;
    ensure!(regular.iter().sum::<u64>() == 492 * M, "it is not there as a whole: {spans}");
    ensure!(spans["counters"]["spanning"] == 1, "it is not counted: {spans}");
    host.succeed()?;
    Ok(Outcome::Passed)
}

/// A volume is in what donors lend, which have 128 MiB of each node or so, and in no file; a
/// regular VM comes that has to be on node 1, and the node is killed as that gives way.
const LENDS: &str = r#"
load ublk_drv
lends() { start --manage 384M --buffer 32M --lend 256M; }
all_is_lent() { status | grep -o '"lent_[a-z]*_bytes":[0-9]*' | awk -F: '{ s += $2 } END { exit s != 268435456 }'; }
# The manager hears of it a moment later than the agent.
manager_knows() {
  hecaton status --json --manager http://127.0.0.1:7070 | grep -o '"lend_bytes":[0-9]*' | awk -F: '{ s += $2 } END { exit s < 100663296 }'
}
# What is said is a look old. The donors' books, logs and the like are a little more.
agrees() {
  used=$(status | sed "s/.*\"node\":$1[^}]*\"lent_used_bytes\":\([0-9]*\).*/\1/")
  [ $((($(shmem $1) - $2 - used) / 8388608)) -eq 0 ]
}
show() {
  until_true agrees 0 $first0
  until_true agrees 1 $first1
  echo "guest: $1 $(status)"
}
sum() { echo 3 >/proc/sys/vm/drop_caches; md5sum <$disk; }
lends
until_true all_is_lent
first0=$(shmem 0) first1=$(shmem 1)
until_true manager_knows
hecaton volume create d --size 96M --dir /tmp/n >>/tmp/log 2>&1 || die volume
disk=$(hecaton volume export d --ublk --dir /tmp/n 2>>/tmp/log) || die export
dd if=/dev/urandom of=$disk bs=1M count=96 conv=fsync 2>>/tmp/log || die write
sum=$(sum)
until_true all_is_lent
show written
for donor in 0 1; do
  grep -h hecaton-host-numa$donor /proc/[0-9]*/numa_maps | grep -v ledger | grep -q " bind:$donor " || die bound
done

hecaton vm create --regular --name comes --memory 176M --numa 1 --dir /tmp/n -- idle >>/tmp/log 2>&1 &
until_true is '"lent_used_bytes":0\|"waits":"for-memory"\|"name":"comes","kind":"regular","state"'
kill_node
lends
until_true is '"name":"comes","kind":"regular","state":"starting"'
show moved
[ "$(sum)" = "$sum" ] || die damaged
hecaton node drain host-numa0 --manager http://127.0.0.1:7070 --deadline 1 >>/tmp/log 2>&1 && die "there is no room"
hecaton node drain host-numa0 --cancel --manager http://127.0.0.1:7070 || die cancel
kill -9 $(pid comes)
until_true all_is_lent
hecaton node drain host-numa0 --manager http://127.0.0.1:7070 >>/tmp/log 2>&1 || die drain
until_true is '"node":0[^}]*"lent_used_bytes":0,'
show drained
hecaton node drain host-numa0 --cancel --manager http://127.0.0.1:7070 || die cancel
[ "$(sum)" = "$sum" ] || die damaged
"#;

/// A node with an agent lends memory of two NUMA nodes, each through its own donor and limit.
/// When a regular VM needs one NUMA node, only the memory lent there moves to the other NUMA node.
/// This holds although the node daemon is killed meanwhile, and the manager's orders still work.
/// The kernel tells on which NUMA node the memory is.
pub(crate) fn what_is_lent_gives_way_on_its_node(cluster: &Cluster, guests: &Guests) -> TestResult {
    let mut host = host(cluster, guests, "numa-lends", LENDS, None)?;
    // Returns the lent bytes in use per node. The script has checked that they are in memory there.
    let shown = |host: &mut Machine, name: &str| {
        let status = status(host, name)?;
        let used = of_nodes(&status, "lent_used_bytes")?;
        println!("    {name}: {} and {} MiB are lent", used[0] / M, used[1] / M);
        anyhow::Ok((used, status))
    };
    let (used, status) = shown(&mut host, "written")?;
    ensure!(used.iter().all(|bytes| *bytes >= 24 * M), "one donor has it all: {status}");
    let all: u64 = used.iter().sum();
    ensure!(all >= 96 * M, "it is not there: {status}");
    let (used, status) = shown(&mut host, "moved")?;
    ensure!(of_nodes(&status, "regular_bytes")? == [0, 176 * M], "it spans nodes: {status}");
    ensure!(used[1] <= 16 * M, "node 1 has not given way: {status}");
    ensure!(used.iter().sum::<u64>() == all, "something is lost: {status}");
    let (used, status) = shown(&mut host, "drained")?;
    ensure!(used == [0, all], "not all is on the other node: {status}");
    host.succeed()?;
    Ok(Outcome::Passed)
}

/// Shows the agent a host of two nodes of 768 MiB. The agent runs in its own mount namespace, with
/// files in place of the kernel's. Memory that QEMU binds to the second node is bound to this
/// machine's only node.
fn two_nodes(
    cluster: &Cluster,
    guests: &Guests,
    name: &str,
    script: &str,
) -> anyhow::Result<TwoNodes> {
    let list = fs::read_to_string("/sys/devices/system/node/has_memory").unwrap_or_default();
    if list.trim() != "0" {
        let reason =
            format!("needs a kernel with one NUMA node, and this one's are `{}`", list.trim());
        return Ok(Err(reason));
    }
    let dir = cluster.dir(name)?;
    fs::write(dir.join("has_memory"), "0-1\n")?;
    for node in 0..2 {
        let of_node = dir.join(format!("node{node}"));
        fs::create_dir(&of_node)?;
        let field = |(name, mib): (&str, u64)| format!("Node {node} {name}: {} kB\n", mib << 10);
        let none = ["Active(file)", "Inactive(file)", "SReclaimable"].map(|name| (name, 0));
        let all = [("MemTotal", 768), ("MemFree", 768)].into_iter().chain(none);
        fs::write(of_node.join("meminfo"), all.map(field).collect::<String>())?;
    }
    let mount = "mount --bind \"$0\" /sys/devices/system/node && exec \"$@\"";
    let mut before: Vec<OsString> =
        ["unshare", "--mount", "sh", "-c", mount].map(Into::into).into();
    before.push(dir.into());
    let mut tried = Command::new(&before[0]);
    let tried = tried.args(&before[1..]).arg("true").stdin(Stdio::null()).output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        return Ok(Err("needs unshare, and may not mount in a namespace of its own".to_owned()));
    }
    let mut line = guests.command_line(Qemu::Backports, script);
    let qemu = cluster.file(&format!("{name}-qemu"));
    let script = format!(
        "#!/bin/bash\nexec '{}' \"${{@/host-nodes=1/host-nodes=0}}\"\n",
        Path::new(&line[0]).display()
    );
    fs::write(&qemu, script)?;
    fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755))?;
    line[0] = qemu.into();
    Ok(Ok((before, line)))
}

/// Command prefix of the agent's node, and command line of a guest; or the reason to skip.
type TwoNodes = Result<(Vec<OsString>, Vec<OsString>), String>;

/// The guest says what it has of each of its nodes whenever that has changed, in MiB.
const NODES: &str = "of() { awk '/MemTotal/ {print int($4 / 1024)}' /sys/devices/system/node/node$1/meminfo; }
    while :; do now=\"$(of 0) $(of 1)\"; [ \"$now\" = \"$was\" ] || echo guest: nodes $now; was=$now; sleep 1; done";

/// A harvest VM has a virtio-mem device of each node, and gives back of the one on which a regular
/// VM comes; its guest, which has both nodes, loses memory of that one. Also over the kill of the
/// node.
pub(crate) fn a_harvest_vm_gives_on_the_node_in_need(
    cluster: &Cluster,
    guests: &Guests,
) -> TestResult {
    let (before, line) = match two_nodes(cluster, guests, "two-nodes", NODES)? {
        Ok(host) => host,
        Err(reason) => return Ok(Outcome::Skipped(reason)),
    };
    let mut host = Host::start_by(cluster, &[], before)?;
    let arguments = ["--harvest", "--min", "256M", "--max", "1G"];
    let mut harvest = host.machine_by(line, "harvest", &arguments, &[])?;
    let admitted = until("it is admitted", GUEST_PATIENCE, || {
        let seen = host.status().and_then(|status| parts(&status));
        Ok(seen.map_err(|error| format!("{error:#}")))
    })?;
    // Its minimum is on the node that had most, which is the guest's first. All below is in the
    // guest's order.
    let nodes = admitted.map(|(node, _)| node);
    let is =
        |host: &Host<'_>, what: &str, regular: [u64; 2], harvested: &dyn Fn([u64; 2]) -> bool| {
            host.eventually(what, GUEST_PATIENCE, |status| {
                adds_up(status)?;
                let all = of_nodes(status, "regular_bytes")?;
                let has_come = nodes.map(|node| all[node]) == regular.map(|mib| mib * M);
                let Ok(parts) = parts(status) else { return Ok(false) };
                Ok(has_come && harvested(parts.map(|(_, mib)| mib)))
            })?;
            // A machine that is silent for a moment has none.
            if let Ok([(_, first), (_, second)]) = parts(&host.status()?) {
                println!("    {what}: {first} and {second} MiB harvested");
            }
            anyhow::Ok(())
        };
    // The kernel has a little for itself.
    let has_what_is_said = |host: &Host<'_>, harvest: &mut Machine| {
        until("the guest has what the host says", GUEST_PATIENCE, || {
            let line = harvest.wait_for("guest: nodes")?;
            let mut numbers = line.split(' ').skip(2).map(str::parse::<u64>);
            let mut next = || anyhow::Ok(numbers.next().context("no figure")??);
            let has = [next()?, next()?];
            let said = match parts(&host.status()?) {
                Ok(said) => said.map(|(_, mib)| mib),
                Err(silent) => return Ok(Err(format!("{silent:#}"))),
            };
            let minimum = has[0].checked_sub(said[0]);
            let kernels = said[1].checked_sub(has[1]);
            let is_so = minimum.is_some_and(|mib| (64..=256).contains(&mib))
                && kernels.is_some_and(|mib| mib <= 32);
            let seen = || format!("the guest has {has:?} MiB, the host says {said:?}");
            Ok(if is_so { Ok(()) } else { Err(seen()) })
        })
    };
    is(&host, "alone, it has its maximum", [0, 0], &|[a, b]| a + b == 768)?;
    has_what_is_said(&host, &mut harvest)?;

    let sleeping = sleeping_qemu(cluster)?;
    let regular = |host: &Host<'_>, node: usize, memory: &str| {
        let node = node.to_string();
        let mut command = host.create(&["--regular", "--numa", &node, "--memory", memory]);
        Running::spawn(command.arg(&sleeping).stdout(Stdio::null()))
    };
    // Each node has 640 MiB: 32 MiB are buffer, and 256 MiB of the first are the VM's minimum.
    let second = regular(&host, nodes[1], "320M")?;
    is(&host, "a regular VM is on the second node", [0, 320], &|both| both == [352, 288])?;
    has_what_is_said(&host, &mut harvest)?;
    let first = regular(&host, nodes[0], "192M")?;
    is(&host, "and one on the first", [192, 320], &|both| both == [160, 288])?;
    has_what_is_said(&host, &mut harvest)?;
    host.kill_node()?;
    host.start_node()?;
    is(&host, "the next agent finds it as it is", [192, 320], &|both| both == [160, 288])?;
    drop(second);
    is(&host, "the second is its own again", [192, 0], &|both| both == [160, 608])?;
    has_what_is_said(&host, &mut harvest)?;
    drop(first);
    is(&host, "it has its maximum again", [0, 0], &|[a, b]| a + b == 768)?;
    Ok(Outcome::Passed)
}

/// Returns the host's nodes in the guest's order, and the MiB that the harvest VM has harvested of
/// each. Fails unless the harvest VM runs.
fn parts(status: &Value) -> anyhow::Result<[(usize, u64); 2]> {
    let mut machines = status["machines"].as_array().into_iter().flatten();
    let machine =
        machines.find(|machine| machine["name"] == "harvest").context("it is not there")?;
    ensure!(machine["state"] == "running", "it does not run: {machine}");
    let part = |part: usize| {
        let part = &machine["nodes"][part];
        let node = part["node"].as_u64().context("it has no such part")?;
        let bytes = part["harvested_bytes"].as_u64().context("nothing is said of it")?;
        anyhow::Ok((usize::try_from(node)?, bytes / M))
    };
    Ok([part(0)?, part(1)?])
}

/// A VM with a balloon has all its memory on the named node. A regular VM on the other node takes
/// none of that memory.
pub(crate) fn a_balloon_gives_on_its_node(cluster: &Cluster, guests: &Guests) -> TestResult {
    let (before, line) =
        match two_nodes(cluster, guests, "two-nodes-balloon", "echo guest: waits; sleep 3600")? {
            Ok(host) => host,
            Err(reason) => return Ok(Outcome::Skipped(reason)),
        };
    let host = Host::start_by(cluster, &[], before)?;
    let arguments = ["--harvest", "--balloon", "--numa", "1", "--min", "192M", "--max", "512M"];
    let mut harvest = host.machine_by(line, "harvest", &arguments, &[])?;
    harvest.wait_for("guest: waits")?;
    let is = |what: &str, regular: [u64; 2], harvested: u64| {
        host.eventually(what, GUEST_PATIENCE, |status| {
            adds_up(status)?;
            let nodes = &status["machines"].as_array().context("no machines")?.iter();
            let machine = nodes.clone().find(|machine| machine["name"] == "harvest");
            let machine = machine.with_context(|| format!("it is gone: {status}"))?;
            ensure!(machine["nodes"].as_array().map(Vec::len) == Some(1), "{status}");
            Ok(of_nodes(status, "minimum_bytes")? == [0, 192 * M]
                && of_nodes(status, "harvested_bytes")? == [0, harvested * M]
                && machine["nodes"][0]["harvested_bytes"] == harvested * M
                && of_nodes(status, "regular_bytes")? == regular.map(|mib| mib * M))
        })
    };
    is("it has its maximum", [0, 0], 320)?;
    let sleeping = sleeping_qemu(cluster)?;
    let regular = |node: &str, memory: &str| {
        let mut command = host.create(&["--regular", "--numa", node, "--memory", memory]);
        Running::spawn(command.arg(&sleeping).stdout(Stdio::null()))
    };
    let other = regular("0", "600M")?;
    is("a regular VM is on the other node", [600, 0], 320)?;
    let here = regular("1", "256M")?;
    is("and one on its own", [600, 256], 160)?;
    let left = held(host.machine_pid("harvest")?)?;
    ensure!(left <= 352 * M, "{left} bytes are still in memory");
    drop(here);
    is("its node is its own again", [600, 0], 320)?;
    drop(other);
    Ok(Outcome::Passed)
}

/// Returns the agent's status that the host printed under this name.
fn status(host: &mut Machine, name: &str) -> anyhow::Result<Value> {
    let start = format!("guest: {name} ");
    let line = host.wait_for(&start)?;
    let json = line.split_once(&start).context("another line")?.1;
    let status = serde_json::from_str(json).with_context(|| format!("no status: {json}"))?;
    adds_up(&status)?;
    Ok(status)
}

/// A class of each of the two nodes.
fn of_nodes(status: &Value, class: &str) -> anyhow::Result<[u64; 2]> {
    let nodes = status["nodes"].as_array().context("no nodes")?;
    ensure!(nodes.len() == 2, "the host has other nodes: {status}");
    let bytes = |node: usize| nodes[node][class].as_u64().context("a class is missing");
    Ok([bytes(0)?, bytes(1)?])
}
