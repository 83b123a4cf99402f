%% Fills a table of ETS and maps of processes, and prints what they hold.
-module(maps_of_erlang).
-export([main/0]).

main() ->
    Table = ets:new(table, [set]),
    Count = 400000,
    [ets:insert(Table, {{key, I * 7919 rem Count}, integer_to_list(I)}) || I <- lists:seq(0, Count - 1)],
    Self = self(),
    [spawn(fun() -> Self ! {P, part(P)} end) || P <- lists:seq(1, 8)],
    Parts = [receive {P, Sum} -> Sum end || P <- lists:seq(1, 8)],
    Sum = ets:foldl(fun({_, Text}, S) -> S + length(Text) end, 0, Table),
    io:format("~p ~p ~p~n", [Sum, ets:info(Table, size), Parts]).

part(P) ->
    Map = maps:from_list([{I, [I, P, I * 2]} || I <- lists:seq(1, 30000)]),
    maps:fold(fun(_, V, S) -> S + lists:sum(V) end, 0, Map).
