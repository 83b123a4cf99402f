//! Containers take part in what a node's agent divides: programs in memory cgroups whose limits it
//! moves. No guest is needed but for the other version of cgroups.

use crate::{
    agent::{Host, M, adds_up},
    harness::{
        Outcome, TestResult,
        cluster::{Cluster, PATIENCE},
        guest::{Guests, Machine},
        process::{kill_dead, run, signal},
    },
    numa_host,
};
use anyhow::{Context as _, ensure};
use rustix::process::Signal;
use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

const ELASTIC: &str = env!("CARGO_BIN_EXE_elastic-memory");

/// Names that nobody else's containers have at the same time.
fn name(word: &str) -> String {
    format!("{word}-{}", std::process::id())
}

/// The reason to skip if this host has no memory cgroups of a version that the tests know the place
/// of.
fn lacking() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("memory cgroups take root".to_owned());
    }
    match hecaton_memory::cgroup::Hierarchy::find() {
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    }
}

/// A container, which says what its program does.
fn start(host: &Host<'_>, name: &str, options: &[&str], words: &[&str]) -> anyhow::Result<Machine> {
    let mut command = host.create(&[&["--container", "--name", name], options].concat());
    command.args(words);
    Machine::spawn(name, command, PathBuf::new())
}

/// Has the program do something, and waits until it has.
fn does(container: &mut Machine, words: &str) -> anyhow::Result<()> {
    container.say(words)?;
    container.wait_for(words).map(drop)
}

/// The container's cgroup, as the agent tells.
fn cgroup(host: &Host<'_>, name: &str) -> anyhow::Result<PathBuf> {
    let status = host.status()?;
    let machines = status["machines"].as_array().context("no machines")?;
    let machine = machines.iter().find(|machine| machine["name"] == name);
    let group = machine.and_then(|machine| machine["cgroup"].as_str());
    Ok(group.with_context(|| format!("{name} is no container: {status}"))?.into())
}

fn members(group: &Path) -> anyhow::Result<Vec<u32>> {
    let text = fs::read_to_string(group.join("cgroup.procs"))?;
    text.lines().map(|line| line.parse().context("no process")).collect()
}

fn limit(group: &Path) -> anyhow::Result<u64> {
    let files = ["memory.max", "memory.limit_in_bytes"];
    let text = files.iter().find_map(|file| fs::read_to_string(group.join(file)).ok());
    text.context("no limit")?.trim().parse().context("no number")
}

/// Waits until neither a machine nor anything of it is there any more.
fn nothing_is_left(host: &Host<'_>, groups: &[&Path]) -> anyhow::Result<()> {
    host.eventually("all are gone", PATIENCE, |status| {
        adds_up(status)?;
        Ok(status["machines"][0].is_null())
    })?;
    for group in groups {
        ensure!(!group.exists(), "{} is left", group.display());
    }
    let left: Vec<OsString> = fs::read_dir(host.vms())?
        .map(|entry| Ok(entry?.file_name()))
        .collect::<anyhow::Result<_>>()?;
    ensure!(left == ["agent.lock"], "{left:?} are left");
    Ok(())
}

/// A container has what is free, all of its processes together, and gives file pages, and what its
/// program has freed, to those that come; over the kill of the agent, and its own first process's
/// end. Nobody is killed for it.
pub(crate) fn one_takes_what_is_free_and_gives_it(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking() {
        return Ok(Outcome::Skipped(reason));
    }
    let mut host = Host::start_with(cluster, &[])?;
    let names = ["elastic", "first", "second"].map(name);
    let options = ["--harvest", "--min", "256M", "--max", "1G"];
    // Not the program's own process is what was started.
    let words = ["sh", "-c", "\"$0\" <&0; exit 7", ELASTIC];
    let mut elastic = start(&host, &names[0], &options, &words)?;
    does(&mut elastic, "hold 1")?;
    host.until("alone, it has its maximum", 768, 0)?;
    let group = cgroup(&host, &names[0])?;
    ensure!(limit(&group)? == 1024 * M, "another limit: {}", limit(&group)?);
    does(&mut elastic, "hold 600")?;
    let file = cluster.file("pages");
    does(&mut elastic, &format!("write 200 {}", file.display()))?;
    host.eventually("all of that counts", PATIENCE, |status| {
        adds_up(status)?;
        Ok(status["machines"][0]["held_bytes"].as_u64() >= Some(790 * M))
    })?;

    let fixed = ["--regular", "--memory", "512M"];
    let mut first = start(&host, &names[1], &fixed, &[ELASTIC])?;
    host.until("a regular one has come", 448, 512)?;
    let others = cgroup(&host, &names[1])?;
    ensure!(limit(&group)? == 704 * M && limit(&others)? == 512 * M, "they have other limits");
    does(&mut first, "hold 400")?;
    // It is there with all that it had.
    does(&mut elastic, "hold 600")?;

    // Nobody is there to hear of it, and then somebody else; the program gives back when it likes.
    let mut second = start(&host, &names[2], &["--regular", "--memory", "256M"], &[ELASTIC])?;
    host.eventually("it does not fit", PATIENCE, |status| {
        adds_up(status)?;
        let asked = status["machines"].as_array().into_iter().flatten();
        let asked = asked.filter(|one| one["kind"] == "harvest");
        let is_asked = asked.map(|one| one["requested_bytes"].as_u64()).next().flatten();
        Ok(status["waiting"][0]["name"] == names[2].as_str() && is_asked < Some(448 * M))
    })?;
    host.kill_node()?;
    does(&mut elastic, "hold 300")?;
    host.start_node()?;
    host.until("another one has come, over the kill of the agent", 192, 768)?;
    does(&mut second, "hold 100")?;
    let process = elastic.id();
    ensure!(members(&group)?.contains(&process), "its shell is in another group");
    kill_dead(process);
    elastic.end_of_any_kind()?;

    // The shell is dead: the program that it started is the container now, for the next agent too.
    host.kill_node()?;
    drop(first);
    host.start_node()?;
    host.until("one has left while no agent was there", 704, 256)?;
    ensure!(!others.exists(), "its group is left");
    ensure!(members(&group)?.len() == 1, "{:?} are in the group", members(&group)?);
    does(&mut elastic, "hold 800")?;
    drop(elastic);
    drop(second);
    nothing_is_left(&host, &[&group])?;
    Ok(Outcome::Passed)
}

/// A program whose minimum is needed is told to end before it is killed; one that listens is told,
/// and gives in time; one that gives nothing is killed with all of its processes when somebody
/// waits for what it has. Only the agent of the last one is impatient.
pub(crate) fn one_that_cannot_give_is_evicted(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking() {
        return Ok(Outcome::Skipped(reason));
    }
    if fs::read_to_string("/proc/swaps")?.lines().count() > 1 {
        let reason = "what a container cannot give is swapped here";
        return Ok(Outcome::Skipped(reason.to_owned()));
    }
    // A third of the warning is over when it is told to end, and it has the rest for that.
    let mut host = Host::start_with(cluster, &["--eviction-warning", "60"])?;
    let [stubborn, regular, obedient, large] =
        ["stubborn", "regular", "obedient", "large"].map(name);
    let sleeps = ["sleep", "600"];
    let options = ["--harvest", "--min", "384M", "--max", "512M"];
    let script = "trap 'echo told to end; exit 0' TERM; echo waits; while :; do sleep 0.1; done";
    let mut harvest = start(&host, &obedient, &options, &["sh", "-c", script])?;
    harvest.wait_for("waits")?;
    let first = start(&host, &large, &["--regular", "--memory", "1G"], &sleeps)?;
    harvest.wait_for("told to end")?;
    harvest.end()?;
    host.eventually("the newcomer has its minimum", PATIENCE, |status| {
        adds_up(status)?;
        Ok(status["machines"][0]["name"] == large.as_str())
    })?;
    let status = host.status()?;
    let mut evicted = status["counters"]["evicted"].as_array().context("no counters")?.iter();
    ensure!(evicted.all(|count| *count == 0), "it was killed: {status}");
    drop(first);
    nothing_is_left(&host, &[])?;

    let options = ["--harvest", "--restart", "--min", "256M", "--max", "1G"];
    // The first process ends at once. A shell gives a background process no standard input, so the
    // script passes it on as descriptor 3.
    let words = ["sh", "-c", "exec 3<&0; \"$0\" <&3 & echo started", ELASTIC];
    let mut container = start(&host, &stubborn, &options, &words)?;
    container.wait_for("started")?;
    host.until("alone, it has its maximum", 768, 0)?;
    let group = cgroup(&host, &stubborn)?;
    // It may be heard before it says that it listens.
    container.say("listen")?;
    container.wait_for("is heard")?;
    does(&mut container, "hold 900")?;

    let newcomer = ["--regular", "--memory", "512M"];
    let second = start(&host, &regular, &newcomer, &sleeps)?;
    container.wait_for("told 704")?;
    host.until("it has given in time", 448, 512)?;
    drop(second);
    host.until("it grows again", 768, 0)?;

    // A signal of the test's own: it listens no more, as all of it stands still.
    does(&mut container, "hold 900")?;
    host.kill_node()?;
    host.start_node_with(&["--reclaim-patience", "4"])?;
    container.wait_for("is heard")?;
    host.until("the next agent finds it as it is", 768, 0)?;
    let program = members(&group)?;
    ensure!(program.len() == 1, "{program:?} are in the group");
    signal(program[0], Signal::STOP);
    let before = host.status()?["counters"].clone();
    let third = start(&host, &regular, &newcomer, &sleeps)?;
    host.eventually("it is killed, and the newcomer there", PATIENCE, |status| {
        adds_up(status)?;
        let gave_way = status["gave_way"][0]["name"] == stubborn.as_str();
        Ok(gave_way && status["machines"][0]["name"] == regular.as_str())
    })?;
    ensure!(!group.exists(), "its group is left");
    let after = host.status()?["counters"].clone();
    ensure!(before["evicted"] != after["evicted"], "nobody was evicted: {after}");
    host.eventually("it is wanted back", PATIENCE, |status| {
        Ok(status["waiting"][0]["name"] == stubborn.as_str())
    })?;
    drop(container);
    drop(third);
    nothing_is_left(&host, &[&group])?;
    Ok(Outcome::Passed)
}

/// The command refuses an impossible request with a clear message, and starts no container.
pub(crate) fn what_cannot_be_is_refused(cluster: &Cluster) -> TestResult {
    if let Some(reason) = lacking() {
        return Ok(Outcome::Skipped(reason));
    }
    let started = cluster.file("container-started");
    let refused = |host: &Host<'_>, options: &[&str], words: &str| {
        let mut command = host.create(&[&["--container"], options].concat());
        let ended = run(command.arg("touch").arg(&started), PATIENCE)?;
        ensure!(!ended.status.success(), "{options:?} is taken");
        ensure!(ended.stderr.contains(words), "{options:?}: {}", ended.stderr);
        ensure!(!started.exists(), "it was started");
        anyhow::Ok(())
    };
    let host = Host::start_with(cluster, &[])?;
    let taken = name("taken");
    let there = start(&host, &taken, &["--regular", "--memory", "64M"], &["sleep", "600"])?;
    host.eventually("it is there", PATIENCE, |status| Ok(!status["machines"][0].is_null()))?;
    let group = cgroup(&host, &taken)?;
    let foreign = name("foreign");
    let others = group.with_file_name(format!("hecaton-vm-{foreign}"));
    fs::create_dir(&others)?;
    let checked = [
        (&["--harvest", "--min", "2G", "--max", "1G"][..], "2G is more than the maximum of 1G"),
        (
            &["--harvest", "--balloon", "--min", "64M", "--max", "1G"],
            "a container gives by its limit",
        ),
        (&["--regular", "--memory", "64M", "--name", &taken], "choose another name"),
        (&["--regular", "--memory", "64M", "--name", &foreign], "no machine's of this agent"),
        (&["--regular", "--memory", "64M", "--numa", "77"], "no NUMA node 77"),
    ]
    .into_iter()
    .try_for_each(|(options, words)| refused(&host, options, words));
    fs::remove_dir(&others)?;
    checked?;
    drop(there);
    nothing_is_left(&host, &[&group])?;
    drop(host);

    for (script, words) in [
        ("mount -t tmpfs tmpfs /sys/fs/cgroup", "there is no memory cgroup controller"),
        ("mount -o remount,bind,ro /sys/fs/cgroup/memory", "run it as root"),
    ] {
        if script.contains("memory") && !Path::new("/sys/fs/cgroup/memory").exists() {
            println!("skipped: cgroups that cannot be written: they are of version 2 here");
            continue;
        }
        let script = format!("{script} && exec \"$@\"");
        let before = ["unshare", "--mount", "--propagation", "private", "sh", "-c", &script, "sh"];
        let before = before.iter().map(OsString::from).collect();
        let host = Host::start_by(cluster, &[], before)?;
        refused(&host, &["--regular", "--memory", "64M"], words)?;
    }
    Ok(Outcome::Passed)
}

/// In a guest that has two NUMA nodes, two processors and cgroups of version 2. A machine and a
/// container of one core each want the same processor; then they are idle, and it is about memory.
/// In the end the agent finds a hierarchy that is as in a container's namespace.
const TWO_NODES: &str = r#"
cgroups=/sys/fs/cgroup
mkdir -p $cgroups && mount -t cgroup2 none $cgroups || die cgroup
die() { echo "guest: at $*"; cat /tmp/log /tmp/said; status; cat $group/cgroup.procs $group/memory.max $group/memory.high; exit 1; }
# agent SECONDS: so long it waits for what a container does not give.
agent() { start --manage 512M --buffer 64M --numa-balance --reclaim-patience $1 --reclaim-time $1; }
agent 400
refused "a container has memory of one NUMA node" --regular --container --memory 16M -- idle
groups=$(status | sed 's/.*"group":"\([^"]*\)".*/\1/')
group=$groups/vm-grows
cat >/bin/busy <<'EOF'
for program in $(seq $programs); do taskset 1 sh -c 'while [ -e /tmp/busy ]; do :; done' & done
EOF
touch /tmp/busy
create machine regular starting --cores 1 --memory 16M --numa 0 -- sh -c 'programs=4; . /bin/busy; wait; exec sleep 3600'
# All that node 1 has beside the others is what is left.
is_asked() { [ $(cat $group/memory.high) -lt $((112 << 20)) ]; }
gave() { is_asked && [ $(cat $group/memory.max) = $(cat $group/memory.high) ]; }
limit() { [ $(cat $group/memory.max) = $(($1 << 20)) ] && [ $(cat $group/memory.high) = $(($1 << 20)) ]; }
none_killed() { grep -q '^oom_kill 0' $group/memory.events || die killed $(cat $group/memory.events); }
weights() { [ "$(echo $(cat $groups/cpu.weight $groups/vm-machine/cpu.weight $group/cpu.weight))" = "200 100 $1" ]; }
used() { sed -n 's/usage_usec //p' $groups/vm-$1/cpu.stat; }
has_had() { [ $(($(used $1) - $2)) -gt 1000000 ]; }
mkfifo /tmp/in; exec 8<>/tmp/in
does() { : >/tmp/said; echo "$*" >&8; until_true grep -q "$*" /tmp/said; }
(hecaton vm create --container --harvest --min-cores 1 --min 32M --max 192M --numa 1 --name grows --dir /tmp/n -- \
  sh -c 'exec 3<&0; programs=1; . /bin/busy; elastic-memory <&3 & wait' </tmp/in >>/tmp/said 2>>/tmp/log 8>&-; echo "ended $?" >>/tmp/said) &
until_true limit 192
weights 100 || die weights
grep -qx $(pid machine) $groups/vm-machine/cgroup.procs && [ ! -s $groups/cgroup.procs ] || die places
isnt cores_failure || die $(status)
# As systemd would, of a controller that none of its own groups needs.
for taken in cpu memory; do ! echo -$taken 2>/dev/null >$cgroups/cgroup.subtree_control || die taken $taken; done
until_true has_had grows 0
until_true has_had machine 0
four=$(used machine) one=$(used grows)
until_true has_had grows $one
four=$(($(used machine) - four)) one=$(($(used grows) - one))
echo "guest: shared one program had $one us of a processor, and four had $four us"
[ $four -lt $((2 * one)) ] && [ $one -lt $((2 * four)) ] || die shared
rm /tmp/busy
does hold 120
grep -q 'bind:1 .*N1=[0-9][0-9][0-9][0-9][0-9]' /proc/$(pidof elastic-memory)/numa_maps || die placed
does hold 40
create fixed regular running --container --memory 128M --numa 1 -- idle
[ -e $cgroups/hecaton-vm-fixed/memory.max ] || die fixed
until_true gave
kill_node; echo 7 >$group/cpu.weight; agent 400
until_true weights 100
does hold 60
kill $(pid fixed)
until_true limit 192
none_killed

does hold 150
hecaton vm create --container --regular --memory 128M --numa 1 --name last --dir /tmp/n -- idle >>/tmp/log 2>&1 &
until_true is_asked
max=$(cat $group/memory.max)
[ $max -ge $((150 << 20)) ] && [ $max -le $((192 << 20)) ] || die limit $max
does hold 150
none_killed
# The next agent is impatient; the launcher asks it by itself.
kill_node; agent 4
until_true is '"name":"last","kind":"regular","state":"running"'
[ ! -e $group ] && grep -q 'ended 137' /tmp/said || die left $(ls $group) $(cat /tmp/said)
is '"evicted":\[[0-9,]*[1-9]' || die $(status)
kill $(pid last)
until_true isnt '"name":"last"'
machine=$(pid machine)
kill_node; kill $machine; agent 400
none_left() { ! ls -d $cgroups/hecaton*; }
until_true none_left

kill_node
mkdir $cgroups/box && echo $$ >$cgroups/box/cgroup.procs && mount --bind $cgroups/box $cgroups || die box
agent 400
beside="controller in $cgroups; it has processes of its own"
create counted regular starting --cores 1 --memory 16M --numa 0 -- idle
is "cores_failure\":\"cannot enable the cpu $beside" || die $(status)
refused "cannot enable the memory $beside" --container --regular --memory 16M --cores 1 --numa 0 -- idle
[ -z "$(cat $cgroups/cgroup.subtree_control)" ] || die enabled
none_left || die left
true
"#;

/// With cgroup version 2, on the node that is named; and with cores, of which a machine has some as
/// well.
pub(crate) fn on_two_nodes_and_cgroup_version_2(cluster: &Cluster, guests: &Guests) -> TestResult {
    let elastic = Some(Path::new(ELASTIC));
    let mut host = numa_host::host(cluster, guests, "containers", TWO_NODES, elastic)?;
    println!("    {}", host.wait_for("guest: shared ")?);
    host.succeed()?;
    Ok(Outcome::Passed)
}
