"""A recorded engine: what an engine answered is kept in a file, and answered again without the engine.

To record, ``engine_recorder`` stands before an engine: ``relay`` passes requests on and replies back, part by part, and
``call_writer`` adds both to the file, as rows whose frames bear each other out (``call_frames``). To replay,
``recorded_engine`` stands in its place: ``replay_answers`` finds what was answered among the ``known_calls``, the k-th
of equal ``answers`` for the k-th request, and plays it; ``replayed_state`` has the pauses and aborts that fall into it.
In both, ``served_engine`` is the address, and ``call_request`` says which requests are equal, whose they are, and what
is no call but a fact about the engine, or its administration. ``pytest_plugin`` has the fixture for tests.

Import from the folder above: ``from forebay.replay import RecordedEngine, EngineRecorder``.
"""
