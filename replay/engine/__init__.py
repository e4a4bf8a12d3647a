"""A recorded engine: what an engine answered is kept in a file, and answered again without the engine.

To record, ``engine_recorder`` stands before an engine: ``relay`` passes requests on and replies back, part by part, and
``call_writer`` adds both to the file. To replay,
``recorded_engine`` stands in its place: ``replay_answers`` takes the answer to a request out of the ``cassette``, and
plays it; ``replayed_state`` has the pauses and aborts that fall into it. In both, ``served_engine`` is the address.
``pytest_plugin`` has the fixture for tests.

Import from the folder above: ``from forebay.replay import RecordedEngine, EngineRecorder``.
"""
